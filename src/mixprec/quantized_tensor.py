"""What quantising makes: codes with their scales, and the ways out of them.

    x ~= values * scale

An operand is [free, contraction]: rows are the product of the leading axes, the contraction axis is
last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mixprec.codes import code_dtype, decode, pack_nibbles, unpack_nibbles
from mixprec.formats import FloatFormat, get_format
from mixprec.quant_spec import UNSCALED, QuantSpec
from mixprec.rounding import holds
from mixprec.scale_rules import SCALE_RULES, make_scales, tensor_scale
from mixprec.scaling import num_blocks, times_blocks
from mixprec.serialization import spec_from, to_plain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class QuantizedTensor:
    """An operand in codes: x ~= values * scale.

    A value: ``pickle``, ``copy.deepcopy`` and ``torch.save`` take it as it is; ``to_tensors`` is
    for files without pickle. ``==`` compares identity, as the object is hashable; ``equal``
    compares what it holds.

    Args:
        codes: Bit patterns of x's shape (4-bit formats: two a byte along the last axis, the even
            index in the low nibble, a last odd nibble padded with 0; or one a byte, on the way to
            a product); or float32 values, on the way to a product that would decode them at once.
        scale: [free blocks, contraction blocks], as the rule keeps it: float32 factors, or codes
            (uint8) of e8m0 or, for nvfp4, of e4m3; None without a scale.
        tensor_amax: float32 [1, 1]: nvfp4's A, of which the factor of the whole tensor is made.
        amax: The data's own largest magnitudes, float32, of scale's shape; None when unknown.
        encode: The factors that x was multiplied by, of scale's shape; None when unknown.
        is_scaled: Whether values in place of codes are times their blocks' scales.
        held: Values decoded ahead and their factor (``codes.decode_unscaled``), for an operand of
            several products; else None.
        spec: How it was quantised.
        shape: Logical shape of x.
    """

    codes: Tensor
    scale: Tensor | None
    amax: Tensor | None
    spec: QuantSpec
    shape: torch.Size
    encode: Tensor | None = None
    tensor_amax: Tensor | None = None
    is_scaled: bool = False
    held: tuple[Tensor, float] | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(free, contraction) elements."""
        return matrix_shape(self.shape)

    @property
    def values(self) -> Tensor:
        """The decoded values, float32 (float64 for wider formats); scaled if ``is_scaled``."""
        fmt = self.spec.format
        if self.is_decoded:
            return self.codes
        dtype = torch.float32 if holds(get_format("fp32"), fmt) else torch.float64
        return decode(self._unpacked_codes(), fmt, dtype)

    @property
    def block_scale(self) -> Tensor:
        """float32 [free blocks, contraction blocks]: what the values of each block are times."""
        assert self.scale is not None
        return SCALE_RULES[self.spec.scale_rule].block_scale(self.scale)

    @property
    def tensor_scale(self) -> Tensor | None:
        """float32 [1, 1], the factor beside the block scales; None where the rule has none."""
        return None if self.tensor_amax is None else tensor_scale(self.tensor_amax)

    @property
    def is_decoded(self) -> bool:
        """Whether it holds values in place of codes."""
        return self.codes.is_floating_point()

    @property
    def is_packed(self) -> bool:
        """Whether there are two codes a byte."""
        has_pairs = self.spec.format.bits == 4 and len(self.shape) > 0
        return has_pairs and self.codes.shape[-1] != self.shape[-1]

    def packed(self) -> QuantizedTensor:
        """The same with 4-bit codes two a byte, as it is kept."""
        if self.is_packed or self.spec.format.bits != 4:
            return self
        assert not self.is_decoded
        return replace(self, codes=_stored(self.codes, self.spec.format))

    def _unpacked_codes(self) -> Tensor:
        if not self.is_packed:
            return self.codes
        width = self.shape[-1] if self.shape else 1
        return unpack_nibbles(self.codes, self.spec.format)[..., :width].reshape(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values * block scale * tensor scale, in float32, then rounded to dtype.

        Returns:
            Tensor of ``shape``, of the transformed values where ``spec.hadamard``. A block with a
            NaN scale is NaN throughout.
        """
        values = self.values
        if self.scale is not None and not self.is_scaled:
            matrix = values.reshape(self.matrix_shape)
            values = times_blocks(matrix, self.block_scale, self.spec.block).reshape(self.shape)
        if self.tensor_scale is not None:
            values = values * self.tensor_scale.reshape(())
        return values.to(dtype)

    def t(self) -> QuantizedTensor:
        """The same values transposed, as views (packed codes are packed anew); 2-D.

        Raises:
            ValueError: Another number of axes.
        """
        if len(self.shape) != 2:
            raise ValueError(
                f"shape: got {tuple(self.shape)}; only a matrix is transposed; reshape x before it "
                "is quantised"
            )
        codes = self._unpacked_codes().t()
        free, contraction = self.spec.block
        is_square = free == contraction
        result = QuantizedTensor(
            codes=codes,
            scale=_transposed(self.scale),
            amax=_transposed(self.amax),
            encode=_transposed(self.encode),
            tensor_amax=self.tensor_amax,
            is_scaled=self.is_scaled,
            held=None if self.held is None else (self.held[0].t(), self.held[1]),
            spec=self.spec if is_square else replace(self.spec, block=(contraction, free)),
            shape=torch.Size(self.shape[::-1]),
        )
        # of one column or none both forms are the same
        is_unpacked = self.is_decoded or self.codes.shape[1] == self.shape[1] > 1
        return result if is_unpacked else result.packed()

    def __getitem__(self, rows: slice) -> QuantizedTensor:
        """Rows of the first axis, as views: the codes and scales that they have in the whole.

        Args:
            rows: A slice of step 1 whose ends lie between blocks. With more than two axes, one row
                here is as many of the operand as the axes between the first and the last hold.

        Returns:
            The same spec; a scale of the whole axis or tensor stays what it was, so that the result
            is not what quantising the rows alone would give.

        Raises:
            TypeError: rows is no slice.
            ValueError: Fewer than two axes, another step, or an end inside a block.
        """
        start, stop = self._row_range(rows)
        free = self.spec.block[0]

        def cut(per_block: Tensor | None) -> Tensor | None:
            if per_block is None or free == -1:
                return per_block
            return per_block[start // free : -(-stop // free)]

        inner = self.shape[1:-1].numel()
        first, last = (start // inner, stop // inner) if inner else (0, 0)
        return replace(
            self,
            codes=self.codes[first:last],
            scale=cut(self.scale),
            # that of the whole axis may be that of other rows
            amax=None if free == -1 else cut(self.amax),
            encode=cut(self.encode),
            held=None,
            shape=torch.Size((last - first, *self.shape[1:])),
        )

    def _row_range(self, rows: slice) -> tuple[int, int]:
        """First and last row of the operand that a slice of the first axis takes."""
        if not isinstance(rows, slice):
            raise TypeError(
                f"rows: got {type(rows).__name__}; only slices keep blocks whole; pass "
                "slice(start, stop)"
            )
        if len(self.shape) < 2:
            raise ValueError(
                f"rows: got a slice of shape {tuple(self.shape)}; the contraction, its only axis, "
                "is not sliced; reshape x to (1, -1) before it is quantised"
            )
        first, last, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"rows: got step {step}; rows are taken as they follow; use step 1")
        inner, free = self.shape[1:-1].numel(), max(self.spec.block[0], 1)
        start, stop = first * inner, max(first, last) * inner
        for end in (start, stop):
            if end % free and end != self.matrix_shape[0]:
                raise ValueError(
                    f"rows: got an end at row {end} of the operand; blocks of {self.spec.block} "
                    f"share their scale over {free} rows; use multiples of {free}"
                )
        return start, stop

    def equal(self, other: QuantizedTensor) -> bool:
        """Whether both have the same spec, shape, codes and scales, bit for bit.

        All NaN scales are one, and -0 is not 0. Packing, memory layout, and what is only known
        about an operand (amax, encode, held) make no difference.

        Args:
            other: On the same device.
        """
        if not isinstance(other, QuantizedTensor):
            raise TypeError(
                f"other: got {type(other).__name__}; must be a QuantizedTensor; quantise it"
            )
        if (self.spec, self.shape) != (other.spec, other.shape):
            return False
        kept = zip(self._kept().values(), other._kept().values(), strict=True)
        return all(_same_bits(mine, theirs) for mine, theirs in kept)

    def _kept(self) -> dict[str, Tensor | None]:
        """What decoding needs."""
        codes = self.packed().codes
        return {"codes": codes, "scale": self.scale, "tensor_amax": self.tensor_amax}

    def to_tensors(self, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
        """Plain tensors and strings that ``from_tensors`` makes the operand of again.

            tensors, metadata = q.to_tensors()
            safetensors.torch.save_file(tensors, path, metadata)
            torch.save({"tensors": tensors, "metadata": metadata}, path)  # weights_only=True reads

        Args:
            prefix: Put before each name, for several operands in one file.

        Returns:
            Contiguous tensors ``codes`` (4-bit codes packed), ``scale`` and ``tensor_amax``, the
            last two where the rule has them; and ``spec`` and ``shape`` as JSON. What is only known
            about an operand (amax, encode) is not among them.
        """
        tensors = {
            prefix + name: kept.contiguous()
            for name, kept in self._kept().items()
            if kept is not None
        }
        spec, shape = json.dumps(to_plain(self.spec)), json.dumps(list(self.shape))
        return tensors, {f"{prefix}spec": spec, f"{prefix}shape": shape}

    @staticmethod
    def from_tensors(
        tensors: Mapping[str, Tensor], metadata: Mapping[str, str], prefix: str = ""
    ) -> QuantizedTensor:
        """The operand that ``to_tensors`` took apart; other entries are ignored.

        Raises:
            ValueError: An entry is missing, or does not have the type or shape that spec and shape
                ask for.
        """
        for name, entries in (("spec", metadata), ("shape", metadata), ("codes", tensors)):
            if prefix + name not in entries:
                raise ValueError(
                    f"{prefix}{name}: got no entry of this name; it is part of a quantised tensor; "
                    "pass both results of to_tensors, and its prefix"
                )
        spec = spec_from(f"{prefix}spec", json.loads(metadata[f"{prefix}spec"]), None)
        assert spec is not None
        result = QuantizedTensor(
            codes=tensors[f"{prefix}codes"],
            scale=tensors.get(f"{prefix}scale"),
            amax=None,
            tensor_amax=tensors.get(f"{prefix}tensor_amax"),
            spec=spec,
            shape=torch.Size(json.loads(metadata[f"{prefix}shape"])),
        )
        for name, kept in result._kept().items():
            _check_kept(prefix + name, kept, _expected(result)[name])
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        kept = (self.codes, self.scale, self.tensor_amax)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def __repr__(self) -> str:
        spec = self.spec
        transformed = ", hadamard=True" if spec.hadamard else ""
        return (
            f"QuantizedTensor({spec.format}, shape={tuple(self.shape)}, block={spec.block}, "
            f"scale_rule={spec.scale_rule!r}{transformed}, nbytes={self.nbytes})"
        )


def is_scaled_before_sum(spec: QuantSpec, slabs: int) -> bool:
    """Whether a product takes values times their blocks' scales, so that it is one product in all.

    It does where that is exact and the operand has several scales along the contraction, or a
    second one of the whole tensor.
    """
    rule = SCALE_RULES[spec.scale_rule]
    return rule.is_exact and (slabs > 1 or rule.has_tensor_scale)


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.is_floating_point():
        a, b = (x.masked_fill(x.isnan(), torch.nan).view(torch.int32) for x in (a, b))
    return torch.equal(a, b)


def _expected(q: QuantizedTensor) -> dict[str, tuple[torch.dtype, tuple[int, ...]] | None]:
    """Type and shape of what decoding needs, by spec and shape; None for what there is not."""
    spec, sizes = q.spec, q.shape
    if spec.format.bits == 4:
        sizes = torch.Size((*sizes[:-1], -(-sizes[-1] // 2))) if sizes else torch.Size((1,))
    scale = whole = None
    if spec.scale_rule != UNSCALED:
        made = make_scales(torch.zeros(1, 1), spec.scale_rule, spec.format)
        free, contraction = map(num_blocks, q.matrix_shape, spec.block)
        scale = (made.scale.dtype, (free, contraction))
        whole = None if made.tensor_amax is None else (made.tensor_amax.dtype, (1, 1))
    return {
        "codes": (code_dtype(spec.format), tuple(sizes)),
        "scale": scale,
        "tensor_amax": whole,
    }


def _check_kept(
    name: str, kept: Tensor | None, expected: tuple[torch.dtype, tuple[int, ...]] | None
) -> None:
    found = None if kept is None else (kept.dtype, tuple(kept.shape))
    if found != expected:
        got, must = (
            "none" if pair is None else f"{pair[0]} {pair[1]}" for pair in (found, expected)
        )
        raise ValueError(
            f"{name}: got {got}; spec and shape ask for {must}; pass the entries of one operand"
        )


def _transposed(per_block: Tensor | None) -> Tensor | None:
    return per_block if per_block is None or per_block.numel() == 1 else per_block.t()


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(free, contraction) elements of a tensor of a shape."""
    return (shape[:-1].numel(), shape[-1]) if shape else (1, 1)


def _stored(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """4-bit codes as a QuantizedTensor keeps them: two a byte, padded to an even number."""
    if codes.ndim == 0:
        codes = codes.reshape(1)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return pack_nibbles(codes, fmt)
