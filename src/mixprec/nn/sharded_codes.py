"""One sharded weight as FSDP2 gathers it in codes: its own rows rounded, the whole handed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mixprec.gathered_weight import GatheredWeight
from mixprec.linear_products import (
    W_GRAD_INPUT,
    W_OUTPUT,
    shared_positions,
    state_position,
)
from mixprec.nn.layer import QuantizedLayer
from mixprec.quant_spec import QuantSpec
from mixprec.quantization import QuantizedTensor, requantize
from mixprec.recipes import Recipe
from mixprec.scale_rules import make_scales
from mixprec.scaling import block_amax, delayed_amax
from mixprec.sharding import spread_over


class Shards(NamedTuple):
    """Where the rows of a weight [N, K] are: those of rank r begin at r * rows.

    rows: Of each rank, ceil(N / ranks); the last ones may have fewer, or none.
    first: The first row of this rank.
    """

    shape: tuple[int, int]
    rows: int
    first: int
    group: dist.ProcessGroup

    @staticmethod
    def of(weight: Tensor) -> Shards | str:
        """Of a parameter that ``fully_shard`` made, or why it has none that serve."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if not isinstance(weight, DTensor):
            return "it is not sharded by fully_shard"
        mesh, (*others, own) = weight.device_mesh, weight.placements
        axis = mesh.ndim - 1
        if own != Shard(0) or any(other != Replicate() for other in others):
            return "it is sharded otherwise than along its first axis alone"
        if weight._local_tensor.device.type != mesh.device_type:
            return "it is offloaded"
        if mesh.size(axis) == 1 or not weight.numel():
            return "nothing of it is gathered"
        rows = -(-weight.shape[0] // mesh.size(axis))
        return Shards(
            shape=(weight.shape[0], weight.shape[1]),
            rows=rows,
            first=rows * mesh.get_local_rank(axis),
            group=mesh.get_group(axis),
        )


def largest(amaxes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of all ranks' amaxes, elementwise; NaN is above all."""
    spread = spread_over(group)
    assert spread is not None
    return spread.largest(amaxes)


def codings(recipe: Recipe) -> tuple[QuantSpec | None, ...]:
    """How a weight is quantised: for output, and for grad_input where that takes other values."""
    specs = (recipe.specs[W_OUTPUT], recipe.specs[W_GRAD_INPUT])
    return specs[:1] if W_GRAD_INPUT in shared_positions(recipe) else specs


class _Scales(NamedTuple):
    encode: Tensor
    scale: Tensor
    amax: Tensor


@dataclass(slots=True, eq=False)
class Sent:
    """What this rank has sent of a weight so far, as a ring of ranks does.

    Args:
        codes: In FSDP2's gathers, a byte an element.
        reduced: Bytes of its amaxes.
        again: Codes in gathers beside FSDP2's.
        whole: Elements in high precision, beside FSDP2's gathers.
        width: Bytes of an element where FSDP2 gathers without codes.
    """

    codes: int = 0
    reduced: int = 0
    again: int = 0
    whole: int = 0
    width: int = 4


class ShardedCodes:
    """A weight's codes and scales; has the hooks that FSDP2 finds at the local tensor.

    Attributes:
        shards: Where its rows are.
        local: This rank's rows [n, K].
        amaxes: float32, of the whole weight: for each coding one, or one a row of its operand.
        is_reduced: Whether they are those of the forward pass that is running.
        sent: Its share of the traffic.
    """

    def __init__(self, *, recipe: Recipe, shards: Shards, local: Tensor) -> None:
        self.shards, self.local = shards, local
        self.amaxes: Tensor | None = None
        self.is_reduced = False
        self.sent = Sent()
        self._recipe = recipe
        self._specs = [spec for spec in codings(recipe) if spec is not None]
        self._scales: list[_Scales] = []
        self._dtype = local.dtype
        self._held: tuple[int, Tensor] | None = None
        self._ready: torch.cuda.Event | None = None

    def put_hooks(self, local: Tensor) -> None:
        """Let FSDP2 find this where it looks when it gathers."""
        if "fsdp_pre_all_gather" not in vars(local):
            local.fsdp_pre_all_gather = self.fsdp_pre_all_gather  # type: ignore[attr-defined]
            local.fsdp_post_all_gather = self.fsdp_post_all_gather  # type: ignore[attr-defined]
            self.local = local

    def __reduce__(self) -> str:
        raise TypeError(
            "parameter: got one whose gathers go over this process group; it is neither copied nor "
            "saved with it; copy or save model.state_dict()"
        )

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], int]:
        """This rank's share of a gather, and which coding it is of: forward's, or backward's."""
        if not isinstance(module, QuantizedLayer) or module.recipe != self._recipe:
            raise ValueError(
                f"model: got another recipe than {self._recipe} since gather_codes; what is "
                "gathered cannot change; convert and shard a fresh model"
            )
        is_backward = torch._C._current_graph_task_id() != -1
        index = len(self._specs) - 1 if is_backward else 0
        with torch.inference_mode(False), torch.no_grad():
            if not is_backward or not self._scales:
                self._dtype = mp_policy.param_dtype or self.local.dtype
                self._make_scales(module)
            codes = self._own_codes(index)
        self.sent.codes += codes.numel() * self._others
        self.sent.width = self._dtype.itemsize
        return (codes,), index

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: int,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight of which every rank has the codes now."""
        (codes,) = all_gather_outputs
        self._held = metadata, codes
        if out is None:
            return GatheredWeight(self, self.shards.shape, param_dtype, codes.device), ()
        assert isinstance(out, GatheredWeight)
        out.source = self
        return None

    def operand(self, position: int) -> QuantizedTensor:
        """The weight as an operand: [N, K] for output, [K, N] for grad_input."""
        is_again = position == W_GRAD_INPUT
        index = len(self._specs) - 1 if is_again else 0
        assert self._held is not None
        held, codes = self._held
        if held != index:
            # a pass that FSDP2 gathers nothing for, or that recomputes what another one has done
            codes = self._gathered(self._own_codes(index))
        codes = codes[: self.shards.shape[0]]
        scales = self._scales[index]
        if codes.is_cuda:
            for made in scales:
                made.record_stream(torch.cuda.current_stream(codes.device))
        operand = QuantizedTensor(
            codes=codes.t() if index else codes,
            scale=scales.scale,
            amax=scales.amax,
            encode=scales.encode,
            spec=self._specs[index],
            shape=torch.Size(self.shards.shape[::-1] if index else self.shards.shape),
        )
        return operand.t() if is_again and not index else operand

    def decoded(self) -> Tensor:
        """The weight as the codes that are here have it."""
        assert self._held is not None
        is_backward = self._held[0] > 0
        values = self.operand(W_GRAD_INPUT if is_backward else W_OUTPUT).dequantize()
        return values.t() if is_backward else values

    def high_precision(self) -> Tensor:
        """The weight as FSDP2 would gather it without codes."""
        with torch.no_grad():
            return self._gathered(self._padded(self._rows()))[: self.shards.shape[0]]

    def own_amaxes(self) -> Tensor:
        """float32 amaxes of this rank's rows; 0 for rows of others, who know better."""
        found = []
        for index, spec in enumerate(self._specs):
            local = self.local.t() if index else self.local
            amax = block_amax(local, spec.block).reshape(-1).to(torch.float32)
            if self._has_own_rows(index):
                whole = amax.new_zeros(self.shards.shape[0])
                whole[self._own_slice(index)] = amax
                amax = whole
            found.append(amax)
        return torch.cat(found)

    def take_amaxes(self, amaxes: Tensor) -> None:
        """The largest of all ranks' ``own_amaxes``."""
        self.amaxes = amaxes
        if amaxes.is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()
        self.sent.reduced += 2 * amaxes.nbytes * self._others // (self._others + 1)

    @property
    def _others(self) -> int:
        return self.shards.group.size() - 1

    def _rows(self) -> Tensor:
        return self.local.detach().to(self._dtype)

    def _has_own_rows(self, index: int) -> bool:
        """Whether each row of the operand is on one rank, and has a scale of its own."""
        return index == 0 and self._specs[index].block[0] == 1

    def _own_slice(self, index: int) -> slice:
        if not self._has_own_rows(index):
            return slice(None)
        return slice(self.shards.first, self.shards.first + len(self.local))

    def _make_scales(self, layer: QuantizedLayer) -> None:
        if not self.is_reduced:
            # a forward pass that did not begin at the model
            self.take_amaxes(largest(self.own_amaxes(), self.shards.group))
        assert self.amaxes is not None
        if self._ready is not None:
            # FSDP2 gathers on a stream of its own
            self._ready.wait()
        rows = [
            1 if spec.block[0] == -1 else free
            for spec, free in zip(self._specs, self.shards.shape, strict=False)
        ]
        delayed = layer.delayed_states()
        self._scales = []
        for index, amaxes in enumerate(self.amaxes.split(rows)):
            spec, position = self._specs[index], (W_OUTPUT, W_GRAD_INPUT)[index]
            # rounding a weight to a narrower type rounds its largest magnitude alike
            amax = used = amaxes.to(self._dtype).to(torch.float32).reshape(-1, 1)
            state = delayed[state_position(self._recipe, position)]
            if spec.is_delayed:
                assert state is not None
                used = delayed_amax(state, spec.amax_compute_algo, amax)
            made = make_scales(used, spec.scale_rule, spec.format, spec.min_amax)
            self._scales.append(_Scales(made.encode, made.scale, amax))

    def _own_codes(self, index: int) -> Tensor:
        """uint8 [rows, K] of this rank's rows, filled up with zeros."""
        rows, own, scales = self._rows(), self._own_slice(index), self._scales[index]
        codes = requantize(
            rows.t() if index else rows,
            self._specs[index],
            scale=scales.scale[own],
            encode=scales.encode[own],
            amax=scales.amax[own],
            tensor_amax=None,
        ).codes
        return self._padded(codes.t() if index else codes)

    def _padded(self, rows: Tensor) -> Tensor:
        if len(rows) == self.shards.rows:
            return rows.contiguous()
        padded = rows.new_zeros(self.shards.rows, self.shards.shape[1])
        padded[: len(rows)] = rows
        return padded

    def _gathered(self, rows: Tensor) -> Tensor:
        if rows.is_floating_point():
            self.sent.whole += rows.numel() * self._others
        else:
            self.sent.again += rows.numel() * self._others
        group = self.shards.group
        parts = torch.ops._c10d_functional.all_gather_into_tensor(
            rows, group.size(), group.group_name
        )
        whole: Tensor = torch.ops._c10d_functional.wait_tensor(parts)
        return whole
