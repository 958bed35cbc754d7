"""Whether recipes and formats run natively, here and on hardware one need not have, and why.

Of this machine the implementations themselves are asked; of hardware that is not there, the
hardware table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm.accumulation import FP32
from mixprec.gemm.api import GemmSpec, resolve_spec
from mixprec.gemm.block_scales import why_not_specs
from mixprec.gemm.widening import has_fast_units
from mixprec.hardware import GENERATIONS, Generation, generation
from mixprec.quant_spec import QuantSpec
from mixprec.recipes import PRODUCTS, Recipe
from mixprec.variables import dotted

# The torch release that first had a type for the codes; what is absent here has none.
TORCH_TYPES: Mapping[str, tuple[int, int]] = {
    "e4m3": (2, 1),
    "e5m2": (2, 1),
    "e4m3fnuz": (2, 2),
    "e5m2fnuz": (2, 2),
    "e2m1": (2, 8),
}
_SCALES_AFTER_THE_SUM = ((-1, -1), (1, -1))
_CPU_PLAIN = ("fp64", "fp32")
_CPU_UNITS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("AMX BF16", "AVX-512 BF16"),
    "fp16": ("AMX FP16", "AVX-512 FP16"),
}
_NO_FEATURES: Mapping[str, bool] = MappingProxyType({})
_E4M3, _E5M2, _E2M1 = FORMATS["e4m3"], FORMATS["e5m2"], FORMATS["e2m1"]
_FP8 = (_E4M3, _E5M2)
_FP8_IMPL = "scaled_mm"
NATIVE_VENDORS = ("nvidia",)
_NARROW_BITS = 16
_PLAIN = "torch"
# What the units behind an implementation multiply as it is; on decoded values of other formats they
# emulate, if fast.
_UNIT_FORMATS: Mapping[str, tuple[FloatFormat, ...]] = {
    _FP8_IMPL: (*_FP8, _E2M1),
    "bf16_mm": (FORMATS["bf16"],),
    "fp16_mm": (FORMATS["fp16"],),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Whether a recipe or format runs natively, and why.

    Attributes:
        name: Of the recipe or format.
        native: True where the hardware's own units multiply it; False where it is emulated.
        impls: The implementation that each product resolves to, by product; "torch" is a product in
            high precision. Empty for a format, and for hardware that is not there.
        reason: One line; where native sums take fewer bits than FP32, it says so with their bound.
    """

    name: str
    native: bool
    impls: Mapping[str, str]
    reason: str


def local_support(recipe: Recipe) -> Support:
    """How this machine runs a recipe: what ``impl="auto"`` picks for its products, and why.

    A device on which torch itself fails is reported, never raised.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = {product: _pick(getattr(recipe, product), device) for product in PRODUCTS}
    except RuntimeError as error:
        reason = f"torch fails on {device}: {error}"
        return Support(name=str(recipe), native=False, impls={}, reason=" ".join(reason.split()))
    impls = {product: impl for product, (impl, _) in picked.items()}
    emulated = [
        reason
        for product, (impl, reason) in picked.items()
        if not _is_native(getattr(recipe, product), impl)
    ]
    reasons = emulated or [reason for _, reason in picked.values()]
    if _FP8_IMPL in impls.values() and device.type == "cuda":
        formats = [spec.format for spec in recipe.specs if spec is not None]
        reasons += _notes_on_sums(generation(torch.cuda.get_device_capability()), formats)
    return Support(
        name=str(recipe),
        native=not emulated,
        impls=impls,
        reason="; ".join(dict.fromkeys(reasons)),
    )


def region_support(device: torch.device) -> Support:
    """Whether products in a region of 16 bits (``mixprec.amp.autocast``) run natively there."""
    native = has_fast_units(torch.empty((), device=device))
    emulated = "operands rounded to 16 bits, FP32 sums, results rounded, at FP32's speed"
    reason = f"on {device}: " + ("torch's own 16-bit products" if native else emulated)
    return Support(name="16-bit regions", native=native, impls={}, reason=reason)


def native_support(
    what: Recipe | FloatFormat,
    capability: tuple[int, int] | None,
    torch_version: str = str(torch.__version__),
    *,
    vendor: str = "nvidia",
    features: Mapping[str, bool] = _NO_FEATURES,
) -> Support:
    """Whether hardware one need not have runs a recipe or multiplies a format natively.

    Args:
        what: A recipe (all of its products must run natively), or a format.
        capability: Compute capability of a GPU; None for a CPU.
        torch_version: For example "2.13.0+cpu".
        vendor: "nvidia" or "amd"; not used for a CPU.
        features: Of a CPU, as ``cpu_features`` gives them; not used for a GPU.

    Raises:
        ValueError: An unknown vendor, or a version without two numbers.
    """
    place = _place(capability, torch_version, vendor, features)
    if isinstance(what, FloatFormat):
        formats = [what]
        reason = place.why_not_format(what)
    else:
        formats = [spec.format for spec in what.specs if spec is not None]
        products = (getattr(what, product) for product in PRODUCTS)
        reason = next((why for why in map(place.why_not_product, products) if why), None)
    if reason is not None:
        return Support(name=str(what), native=False, impls={}, reason=reason)
    notes = _notes_on_sums(place.unit, formats)
    return Support(
        name=str(what), native=True, impls={}, reason="; ".join([f"native on {place}", *notes])
    )


def why_not_native(
    recipe: Recipe,
    capability: tuple[int, int] | None,
    torch_version: str = str(torch.__version__),
    *,
    vendor: str = "nvidia",
    features: Mapping[str, bool] = _NO_FEATURES,
) -> dict[str, str | None]:
    """Of each of a recipe's products why such hardware does not run it natively, or None.

    Args, Raises: As for ``native_support``.
    """
    place = _place(capability, torch_version, vendor, features)
    return {product: place.why_not_product(getattr(recipe, product)) for product in PRODUCTS}


def _place(
    capability: tuple[int, int] | None,
    torch_version: str,
    vendor: str,
    features: Mapping[str, bool],
) -> _Place:
    return _Place(
        unit=generation(capability, vendor) if capability else None,
        capability=capability or (0, 0),
        torch=release(torch_version),
        cpu_formats=_cpu_formats(features),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Hardware and torch release that a question is about; no unit is a CPU."""

    unit: Generation | None
    capability: tuple[int, int]
    torch: tuple[int, int]
    cpu_formats: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.unit.name} ({dotted(self.capability)})" if self.unit else "this CPU"

    def why_not_format(self, fmt: FloatFormat) -> str | None:
        """Why a format is not multiplied natively here, or None."""
        if self.unit is None:
            if any(fmt == FORMATS[name] for name in self.cpu_formats):
                return None
            return f"no units in {self}, which multiplies {', '.join(self.cpu_formats)}"
        if not self.unit.multiplies(fmt):
            return f"no units in {self}{_instead(self.unit, fmt)}; {_first_with(fmt)}"
        name = next(name for name, known in FORMATS.items() if fmt == known)
        since = TORCH_TYPES.get(name)
        if fmt.bits < _NARROW_BITS and since is None:
            return f"{self} has units, but torch has no type"
        if since is not None and self.torch < since:
            return f"needs torch {dotted(since)}, this is {dotted(self.torch)}"
        return None

    def why_not_product(self, gemm: GemmSpec) -> str | None:
        """Why a product does not run natively here, or None."""
        if gemm.is_exact:
            return "exact sums: made of integer products, no unit adds like that"
        specs = _specs(gemm)
        if not specs:
            return None
        formats = {spec.format for spec in specs}
        units = next((own for own in _UNIT_FORMATS.values() if formats <= {*own}), _FP8)
        for spec in specs:
            if reason := self.why_not_format(spec.format):
                return f"{spec.format}: {reason}"
            if spec.format not in units:
                return f"{spec.format}: no implementation multiplies it natively"
        if gemm.accumulate != FP32:
            return f"sums as of {gemm.accumulate}: only the emulation adds like that"
        if len(specs) == 1:
            return f"{specs[0].format}: no units multiply it with an operand in high precision"
        if self.unit is None:
            return f"{specs[0].format}: no implementation multiplies it natively on {self}"
        if self.unit.vendor not in NATIVE_VENDORS:
            # ROCm's torch.mm refuses out_dtype=torch.float32
            return f"{specs[0].format}: {self} has units, but torch no float32 sums of them there"
        if any(spec.block not in _SCALES_AFTER_THE_SUM for spec in specs):
            return why_not_specs(specs[0], specs[1], self.capability)
        if formats == {_E2M1}:
            return f"{specs[0].format}: the units multiply it in blocks of 16 only"
        if all(spec.format == _E5M2 for spec in specs):
            return f"{_E5M2}: the units multiply it with {_E4M3} only"
        return None


def _cpu_formats(features: Mapping[str, bool]) -> tuple[str, ...]:
    """Formats that a CPU multiplies itself: the plain ones, others by their instructions."""
    extra = (name for name, any_of in _CPU_UNITS.items() if any(map(features.get, any_of)))
    return (*_CPU_PLAIN, *extra)


def _notes_on_sums(unit: Generation | None, formats: Iterable[FloatFormat]) -> list[str]:
    """What there is to say of a unit's sums, if it multiplies FP8 among these formats."""
    if unit is None or not unit.fp8_sums or not any(fmt in _FP8 for fmt in formats):
        return []
    return [unit.fp8_sums]


def _instead(unit: Generation, fmt: FloatFormat) -> str:
    """What a unit multiplies of the same fields, with another bias or other special values."""
    alike = (fmt.exponent, fmt.mantissa, fmt.signed)
    found = [
        name
        for name, known in FORMATS.items()
        if unit.multiplies(known) and (known.exponent, known.mantissa, known.signed) == alike
    ]
    return f", which multiplies {', '.join(found)} in its place" if found else ""


def _first_with(fmt: FloatFormat) -> str:
    """The oldest generations that multiply a format, or that none does."""
    first: dict[str, str] = {}
    for row in GENERATIONS:
        if row.multiplies(fmt):
            since = f" ({dotted(row.capability)})" if any(row.capability) else ""
            first.setdefault(row.vendor, f"{row.name}{since} has")
    return ", ".join(first.values()) or "no GPU of the table has"


def release(torch_version: str) -> tuple[int, int]:
    """Major and minor number of a version such as 2.13.0+cpu."""
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    if not found:
        raise ValueError(
            f"torch_version: got {torch_version!r}; must start with two numbers; pass '2.13.0'"
        )
    return int(found[1]), int(found[2])


def _specs(gemm: GemmSpec) -> list[QuantSpec]:
    """The quantised operands of a product."""
    return [spec for spec in (gemm.a, gemm.b) if spec is not None]


def _is_native(gemm: GemmSpec, impl: str) -> bool:
    """Whether the units behind an implementation multiply a product's own formats."""
    own = _UNIT_FORMATS.get(impl, ())
    return impl == _PLAIN or (
        not gemm.is_exact and all(spec.format in own for spec in _specs(gemm))
    )


def _pick(gemm: GemmSpec, device: torch.device) -> tuple[str, str]:
    """The implementation of a product, and the reason."""
    if gemm.is_plain:
        return _PLAIN, "high precision: torch's own product"
    return resolve_spec(gemm, device, torch.float32)
