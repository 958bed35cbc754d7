"""Data parallel ranks quantise their rows as one process quantises the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import Job, Outcome, Results
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mixprec
from distributed.recording import Used, differences, part, recorded
from mixprec import RECIPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]

QUANTISED = [name for name, recipe in RECIPES.items() if any(recipe.specs)]
SCALED = [name for name in QUANTISED if name.startswith(("fp8", "mxfp", "nvfp"))]
# rows of each rank: unequal, none, and the last no multiple of any block
ROWS = {2: (128, 44), 3: (128, 0, 44)}
M, K, N = 172, 40, 48


def shares() -> tuple[float, float]:
    """Which of the rows of a batch are this rank's, from 0 to 1."""
    rows, rank = ROWS[dist.get_world_size()], dist.get_rank()
    return sum(rows[:rank]) / M, sum(rows[: rank + 1]) / M


def own(x: Tensor) -> Tensor:
    start, end = (round(share * len(x)) for share in shares())
    return x[start:end]


def batch(*sizes: int) -> Tensor:
    """Rows of very different sizes."""
    x = torch.randn(M, *sizes, generator=torch.Generator().manual_seed(1))
    return x * torch.linspace(0.01, 3, M).reshape(M, *[1] * len(sizes))


def layer(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(K, N)
    mixprec.convert(net, recipe, seed=5)
    return net


def passes(net: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Used]]:
    """The gradient of x, and all operands of a forward and a backward pass."""
    x = x.clone().requires_grad_()
    with recorded() as used:
        out = run(x)
        # of very different sizes, and no function of sums that are rounded
        g = batch(*out.shape[1:])
        out.backward(own(g) if len(own(g)) == len(x) else g[: len(x)])
    assert x.grad is not None
    return x.grad, used


def both_ways(make: Callable[[], nn.Module], x: Tensor) -> tuple[nn.Module, nn.Module, list[str]]:
    """A model on all ranks and in one process, after a pass; and where their operands differ."""
    net, alone = make(), make()
    mixprec.distribute(net)
    _, used = passes(net, own(x), net)
    _, whole = passes(alone, x, alone)
    return net, alone, differences(used, [part(use, "M", *shares()) for use in whole])


def quantised_operands(rank: int) -> Outcome:
    return {name: both_ways(partial(layer, name), batch(K))[2] for name in QUANTISED}


def summed_gradients(rank: int) -> Outcome:
    found = {}
    for name in SCALED:
        net, alone, _ = both_ways(partial(layer, name), batch(K))
        for parameter, other in zip(net.parameters(), alone.parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            dist.all_reduce(parameter.grad)
            error = (parameter.grad - other.grad).abs().max() / other.grad.abs().max()
            found[f"{name} {tuple(parameter.shape)}"] = float(error)
    return found


class Experts(nn.Module):
    """Two experts, of which each takes half of the features' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, K, N))

    def forward(self, x: Tensor) -> Tensor:
        half = len(x) // 2
        ends = torch.tensor([half, len(x)], dtype=torch.int32)
        return torch._grouped_mm(x, self.weight, offs=ends)


def other_layers(rank: int) -> Outcome:
    cases: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
        "convolution": (lambda: nn.Conv2d(16, 8, 3), batch(16, 5, 5)),
        "transposed": (lambda: nn.ConvTranspose1d(16, 8, 2, groups=2), batch(16, 4)),
        "bilinear": (lambda: Pairs(nn.Bilinear(16, 8, 16)), batch(24)),
        "cell": (lambda: Second(nn.LSTMCell(K, 16)), batch(K)),
    }
    found = {}
    for name, (make, x) in cases.items():
        # a cell's second product has a gradient that depends on rounded sums
        recipes = ("fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4")
        for recipe in recipes[: 3 if name == "cell" else 4]:
            found[f"{name} {recipe}"] = both_ways(partial(made, make, recipe), x)[2]
    return found


def made(make: Callable[[], nn.Module], recipe: str) -> nn.Module:
    torch.manual_seed(0)
    net = make()
    mixprec.convert(net, recipe, seed=5)
    return net


class Pairs(nn.Module):
    """A layer of two inputs, of one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x[:, :16], x[:, 16:])
        return out


class Second(Pairs):
    """The last result of a layer that has several."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[-1]
        return out


def scale_of(use: Used) -> float:
    assert use.scale is not None
    return float(use.scale)


def experts(rank: int) -> Outcome:
    net = Experts()
    mixprec.convert(net, "fp8_tensorwise")
    mixprec.distribute(net)
    _, used = passes(net, torch.full((4, K), 1.0 + 7 * rank), net)
    return {"scales": [scale_of(use) for use in used if use.position == 0]}


def amaxes(rank: int) -> Outcome:
    net = layer("fp8_tensorwise")
    mixprec.distribute(net)
    _, used = passes(net, torch.full((4, K), 1.0 if rank == 0 else 8.0), net)
    net.eval()
    with recorded() as evaluated:
        if rank == 0:
            net(torch.full((4, K), 1.0))
    return {"scale": scale_of(used[0]), "evaluated": [scale_of(use) for use in evaluated[:1]]}


def nan_on_one_rank(rank: int) -> Outcome:
    found = {}
    for name in ("fp8_tensorwise", "fp8_delayed", "nvfp4", "mxfp8"):
        net = layer(name)
        mixprec.distribute(net)
        x = torch.ones(4, K)
        if rank == 1:
            x[0, 0] = torch.nan
        passes(net, x, net)
        (weight, _) = net.parameters()
        assert weight.grad is not None
        found[name] = [bool(net(x).isnan().all()), bool(weight.grad.isnan().any())]
    return found


def idle_branch(rank: int) -> Outcome:
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    mixprec.convert(net, {"0": "fp8_delayed", "1": "mxfp4"})
    for _ in range(2):
        for module in net[: 1 if rank else 2]:
            module(torch.full((4, 8), 3.0)).sum().backward()
        mixprec.sync_scales(net)
    return {name: value.tolist() for name, value in mixprec.state_dict(net).items()}


def idle_branch_with_history(rank: int) -> Outcome:
    net = layer("fp8_delayed")
    mixprec.distribute(net)
    for step in range(3):
        if step == 0 or rank == 0:
            net(torch.full((4, K), 1.0 + rank)).sum().backward()
        mixprec.sync_scales(net)
    return {"history": mixprec.state_dict(net)["mixprec_amax_output_a"][:3].tolist()}


def recomputed(rank: int) -> Outcome:
    found = {}
    for name in ("fp8_tensorwise", "fp8_delayed", "nvfp4"):
        nets = [layer(name), layer(name)]
        for net in nets:
            mixprec.distribute(net)
        x = own(batch(K))
        plain, used = passes(nets[0], x, nets[0])
        for reentrant in (False, True):
            for buffer in mixprec.state_dict(nets[1]).values():
                buffer.zero_()
            run = partial(checkpoint, nets[1], use_reentrant=reentrant)
            again, used_again = passes(nets[1], x, run)
            first = [use for use in used_again if use.position in (0, 1, 5)]
            kept = [use for use in used if use.position in (0, 1, 5)]
            found[f"{name} {reentrant}"] = [
                torch.equal(plain, again),
                # once in forward and once again
                not differences(first, kept * 2),
            ]
    return found


JOBS: tuple[Job, ...] = (
    quantised_operands,
    summed_gradients,
    other_layers,
    experts,
    amaxes,
    nan_on_one_rank,
    idle_branch,
    idle_branch_with_history,
    recomputed,
)


def as_scale(amax: float) -> float:
    encode = torch.tensor(448 / amax, dtype=torch.float32)
    return float((1 / encode.double()).float())


def test_each_rank_quantises_its_rows_as_one_process_does(sharded: Results) -> None:
    for outcome in sharded(quantised_operands):
        assert {name: found for name, found in outcome.items() if found} == {}


def test_gradients_summed_over_ranks_are_within_the_bound(sharded: Results) -> None:
    for outcome in sharded(summed_gradients):
        assert {name: error for name, error in outcome.items() if error > (M + 3) * 2.0**-24} == {}


def test_other_layers_quantise_their_rows_as_one_process_does(sharded: Results) -> None:
    for outcome in sharded(other_layers):
        assert {name: found for name, found in outcome.items() if found} == {}


def test_experts_share_scales_group_by_group(sharded: Results) -> None:
    outcomes = sharded(experts)
    largest = 1.0 + 7 * (len(outcomes) - 1)
    assert outcomes == [{"scales": [as_scale(largest)] * 2}] * len(outcomes)


def test_a_scale_is_of_the_largest_amax_of_any_rank_but_in_evaluation(sharded: Results) -> None:
    scale = as_scale(8)
    first, *others = sharded(amaxes)
    assert first == {"scale": scale, "evaluated": [as_scale(1)]}
    assert others == [{"scale": scale, "evaluated": []}] * len(others)


def test_nan_on_one_rank_is_seen_where_its_scale_is_shared(sharded: Results) -> None:
    for rank, outcome in enumerate(sharded(nan_on_one_rank)):
        shared, own_block = [True, True], [rank == 1, rank == 1]
        assert outcome["fp8_tensorwise"] == outcome["fp8_delayed"] == shared
        assert not outcome["nvfp4"][0]
        assert outcome["mxfp8"][1] == own_block[1]


def test_an_idle_branch_keeps_nobody_waiting(sharded: Results) -> None:
    first, *others = sharded(idle_branch)
    assert all(other == first for other in others)
    assert first["1.mixprec_noise_step"] == 2
    assert first["0.mixprec_amax_output_a"][:2] == [3.0, 3.0]


def test_an_idle_layer_with_a_history_keeps_nobody_waiting(sharded: Results) -> None:
    outcomes = sharded(idle_branch_with_history)
    assert outcomes == [{"history": [1.0, 1.0, float(len(outcomes))]}] * len(outcomes)


def test_recomputation_gives_the_same_bits(sharded: Results) -> None:
    for outcome in sharded(recomputed):
        assert set(map(tuple, outcome.values())) == {(True, True)}
