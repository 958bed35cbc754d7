"""Parts of an operand quantised as the whole is, in one process; several: tests/distributed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mixprec
from mixprec import Noise, QuantSpec, quantize
from mixprec.formats import FORMATS
from mixprec.scaling import block_amax
from mixprec.sharding import Shard, Sharding, Spread

SPECS = [
    QuantSpec(format=FORMATS["e4m3"]),
    QuantSpec(format=FORMATS["e5m2"], block=(-1, 1), scale_rule="pow2"),
    QuantSpec(format=FORMATS["e4m3"], block=(1, -1), scale_rule="pow2"),
    QuantSpec(format=FORMATS["e4m3"], block=(1, 32), scale_rule="e8m0_rceil"),
    QuantSpec(format=FORMATS["e2m1"], block=(1, 16), scale_rule="nvfp4"),
    QuantSpec(format=FORMATS["e2m1"], block=(-1, 16), scale_rule="nvfp4"),
]


def rows(value: float = 1.0) -> Tensor:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    x[5, 7] = value
    return x * torch.linspace(0.1, 4, 64)[:, None]


@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_part_with_the_whole_s_amaxes_has_the_whole_s_codes(
    spec: QuantSpec, value: float
) -> None:
    x = rows(value)
    whole, start = quantize(x, spec, packed=False), 32
    asked = []

    def reduce(amax: Tensor, axes: tuple[bool, bool]) -> Tensor:
        asked.append(axes)
        if amax.dim() == 0:
            assert whole.tensor_amax is not None
            return whole.tensor_amax.reshape(())
        # the free axis alone is spread: blocks along the other are the part's own
        return block_amax(x, spec.block) if axes[0] else amax

    part = quantize(x[start:], spec, reduce=reduce, packed=False)
    assert torch.equal(part.codes, whole.codes[start:])
    assert part.scale is not None
    assert whole.scale is not None
    own = whole.scale if spec.block[0] == -1 else whole.scale[start:]
    assert torch.equal(part.scale.nan_to_num(-1.0), own.nan_to_num(-1.0))
    assert asked[0] == (spec.block[0] == -1, spec.block[1] == -1)


def test_noise_takes_its_place_as_tensors_too() -> None:
    numbers = Noise(seed=3, row=5, column=7, columns=100)
    tensors = Noise(seed=3, row=torch.tensor(5), column=torch.tensor(7), columns=torch.tensor(100))
    assert torch.equal(numbers.draws((4, 6), "cpu"), tensors.draws((4, 6), "cpu"))
    far = Noise(seed=3, row=2**30, columns=100)
    there = Noise(seed=3, row=torch.tensor(2**30), columns=100)
    assert torch.equal(far.draws((4, 6), "cpu"), there.draws((4, 6), "cpu"))


def test_a_whole_operand_asks_nobody() -> None:
    x, noise = torch.ones(2, 3), Noise(seed=1)
    assert Shard().largest(x, (True, True)) is x
    assert Shard().noise(noise, (2, 3), x.device) is noise
    spread = Spread(group="nobody", rank=0, size=2)
    assert Shard(spread, spread).largest(x, (False, False)) is x


def test_copies_of_layers_keep_who_they_share_rows_with() -> None:
    net = nn.Linear(4, 4)
    mixprec.convert(net, "mxfp8")
    net.sharding = Sharding(rows=Spread(group="0", rank=0, size=2))  # type: ignore[assignment]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.sharding == net.sharding
    mixprec.convert(net, "mxfp8")
    assert net.sharding == Sharding()


def test_distribute_needs_a_process_group() -> None:
    if not dist.is_initialized():
        with pytest.raises(ValueError, match="group: got None; torch"):
            mixprec.distribute(nn.Linear(4, 4))
