"""What gathers of weights take on the wire: counted, beside the same gathers in FP32 and BF16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mixprec.nn.gathering import gathered_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that this rank sends for weights, as a ring of W ranks does.

    An all-gather of b bytes a rank sends (W - 1) * b, an all-reduce of b bytes 2 * (W - 1) / W * b.

    Args:
        gathered: All all-gathers.
        reduced: The amaxes of weights gathered in codes.
        fp32: FSDP2's gathers, were every parameter gathered in FP32.
    """

    gathered: int
    reduced: int
    fp32: int

    @property
    def bf16(self) -> int:
        """FSDP2's gathers, were every parameter gathered in BF16."""
        return self.fp32 // 2

    def __str__(self) -> str:
        found = self.to_dict()
        return (
            f"weights gathered in a step: {found['bytes'] / 1e6:.1f} MB sent, "
            f"{100 * found['of_fp32']:.1f} % of FP32's, {100 * found['of_bf16']:.1f} % of BF16's"
        )

    def to_dict(self) -> dict[str, float]:
        """The figures, with the shares of FP32's and BF16's bytes; 1 where nothing was gathered."""
        sent = self.gathered + self.reduced
        return {
            "bytes": sent,
            "fp32_bytes": self.fp32,
            "bf16_bytes": self.bf16,
            "of_fp32": sent / self.fp32 if self.fp32 else 1.0,
            "of_bf16": sent / self.bf16 if self.fp32 else 1.0,
        }


class GatherCounter(TorchDispatchMode):
    """Counts what all-gathers send while it is entered; made by ``count_gathers``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._gathered = self._elements = self._mixed = 0
        self._before = self._sums()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The operation as it is; of an all-gather the input is what one rank sends to another."""
        if func is torch.ops.c10d._allgather_base_.default:
            self._count(args[1], len(args[0]) // len(args[1]))
        elif func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self._count(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _count(self, own: Tensor, ranks: int) -> None:
        self._gathered += own.nbytes * (ranks - 1)
        if own.dtype == torch.uint8:
            self._mixed += own.nbytes * (ranks - 1)
        else:
            self._elements += own.numel() * (ranks - 1)

    def traffic(self) -> Traffic:
        """What was sent since this was made."""
        after = self._sums()
        codes, reduced, again, whole = (b - a for a, b in zip(self._before, after, strict=True))
        first = next(iter(gathered_weights(self._model)), None)
        width = 1 if first is None else first.sent.width
        # codes go with biases and norms as bytes; what is gathered a second time FP32 would not be
        others = (self._mixed - codes - again) // width + self._elements - whole
        return Traffic(gathered=self._gathered, reduced=reduced, fp32=4 * (codes + others))

    def _sums(self) -> list[int]:
        sent = [astuple(weight.sent)[:4] for weight in gathered_weights(self._model)]
        return [sum(counts) for counts in zip((0,) * 4, *sent, strict=True)]


def count_gathers(model: nn.Module) -> GatherCounter:
    """Count what the gathers of a sharded model's weights send.

        with count_gathers(model) as count:
            loss = criterion(model(x), y)
            loss.backward()
        print(count.traffic().to_dict())

    Args:
        model: What ``gather_codes`` was given, or a model whose weights are gathered as they are.

    Returns:
        A context whose ``traffic()`` has the figures, within it or after it. All all-gathers count,
        those of sharded gradients' norms too. It communicates nothing itself.
    """
    return GatherCounter(model)
