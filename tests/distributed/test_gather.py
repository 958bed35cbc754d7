"""FSDP2 gathers weights in codes: the numbers of ordinary gathers, in a quarter of their bytes."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Job, Outcome, Results
from sharded_networks import batch, full, network, sharded, trained
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import mixprec
from mixprec.linear_products import W_GRAD_INPUT, W_OUTPUT, state_position
from mixprec.nn import GatherReport, QuantizedLinear, count_gathers, gather_codes
from mixprec.train.faults import first_fault
from mixprec.train.transformers import Block

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]

GATHERED = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_rowwise_hp_grad_weight")
BF16_GATHERS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def trains_alike(
    rank: int, recipe: str, steps: int, arguments: dict[str, Any], **settings: Any
) -> bool:
    found = []
    for in_codes in (False, True):
        net = sharded(network(recipe, **settings), **arguments)
        if in_codes:
            gather_codes(net)
        found.append(trained(net, rank, steps))
    return same(*found)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "recomputed": ({}, {"recomputes": True}),
    "not resharded": ({"reshard_after_forward": False}, {}),
    "gathered in bf16": ({"mp_policy": BF16_GATHERS}, {}),
    "bf16 parameters": ({"mp_policy": BF16_GATHERS}, {"dtype": torch.bfloat16}),
    "frozen": ({}, {"trains": False}),
    "tied": ({}, {"ties": True}),
}


def same_training(rank: int) -> Outcome:
    # ranks without rows are where the two sets of codes differ most
    recipes = GATHERED if dist.get_world_size() == 2 else GATHERED[-2:-1]
    return {recipe: trains_alike(rank, recipe, 2, {}) for recipe in recipes}


def same_training_under_settings(rank: int) -> Outcome:
    """With two sets of codes, where settings matter most, and with one."""
    return {
        f"{recipe}, {name}": trains_alike(rank, recipe, 1, arguments, **settings)
        for recipe, names in (
            ("fp8_rowwise", list(CASES)[1:]),
            ("fp8_tensorwise", ["bf16 parameters", "tied"]),
            ("fp8_delayed", ["recomputed", "not resharded"]),
        )
        for name in names
        for arguments, settings in [CASES[name]]
    }


def _differences(net: nn.Sequential, whole: dict[str, Tensor]) -> Iterator[Callable[[], list[str]]]:
    """Hooks that compare each gathered operand with the whole weight, quantised where it is."""

    def check(layer: QuantizedLinear, weight: Tensor, position: int, found: list[str]) -> None:
        spec = layer.recipe.specs[position]
        assert spec is not None
        state = layer.delayed_states()[state_position(layer.recipe, position)]
        operand = layer.weight.source.operand(position)
        x = weight if position == W_OUTPUT else weight.t()
        expected = mixprec.quantize(x, spec, state=state)
        for name in ("scale", "encode", "amax"):
            mine, theirs = getattr(operand, name), getattr(expected, name)
            if not torch.equal(mine.nan_to_num(nan=-1), theirs.nan_to_num(nan=-1)):
                found.append(f"{name} {position}")
        if not operand.equal(expected):
            found.append(f"codes {position}")
        found.append(f"seen {position}")

    for name, layer in net.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight, found = whole[f"{name}.weight"], []
            layer.register_forward_pre_hook(
                lambda layer, _, w=weight, f=found: check(layer, w, W_OUTPUT, f)
            )
            layer.register_full_backward_pre_hook(
                lambda layer, _, w=weight, f=found: check(layer, w, W_GRAD_INPUT, f)
            )
            yield lambda found=found: found


def _plant_zeros(net: nn.Sequential) -> None:
    """On each rank: what rounds to zeros of both signs, a row of zeros."""
    with torch.no_grad():
        own = net[0].second.weight.to_local()
        own[:1, 0], own[:1, 1], own[:1, 2] = -1e-9, 1e-9, -0.0
        own[1:2] = 0


def same_operands(rank: int) -> Outcome:
    outcome = {}
    for recipe in GATHERED:
        for nan in (0, 1):
            net = sharded(network(recipe))
            _plant_zeros(net)
            if nan and rank == 1:
                with torch.no_grad():
                    net[0].first.weight.to_local()[0, 3] = torch.nan
            whole = full(net)
            gather_codes(net)
            found = list(_differences(net, whole))
            net(batch(rank, 0).requires_grad_()).sum().backward()
            outcome[f"{recipe}, NaN {nan}"] = [result() for result in found]
    return outcome


def reports(rank: int) -> Outcome:
    outcome = {}
    for recipe in mixprec.RECIPES:
        if recipe.startswith("fp64") or recipe == "fp32":
            continue
        net = sharded(network(recipe))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report: GatherReport = gather_codes(net)
        outcome[recipe] = {
            "gathered": list(report.gathered),
            "left": dict(report.left),
            "warnings": [str(warning.message) for warning in caught],
        }
    return outcome


def checkpoints(rank: int) -> Outcome:
    """Saved by torch.distributed.checkpoint with codes and without, loaded the other way."""
    outcome: Outcome = {}
    for saves_codes in (False, True):
        folders = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(folders)
        saved, loaded = sharded(network("fp8_rowwise")), sharded(network("fp8_rowwise"))
        gather_codes(saved if saves_codes else loaded)
        before = trained(saved, rank)
        trained(loaded, rank, steps=1)
        outcome[f"plain {saves_codes}"] = all(
            type(value._local_tensor) is Tensor and value.dtype == torch.float32
            for value in (*saved.state_dict().values(), *loaded.parameters())
        )
        dcp.save(saved.state_dict(), checkpoint_id=folders[0])
        state = loaded.state_dict()
        # in place: the model is told of nothing
        dcp.load(state, checkpoint_id=folders[0])
        x = batch(rank, 9)
        outcome[f"same {saves_codes}"] = same(full(loaded), {k: before[k] for k in state})
        outcome[f"output {saves_codes}"] = torch.equal(loaded(x), saved(x))
        replaced = {key: value.clone() for key, value in state.items()}
        loaded.load_state_dict(replaced, assign=True)
        outcome[f"assigned {saves_codes}"] = torch.equal(loaded(x), saved(x))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folders[0])
    return outcome


class Collectives(TorchDispatchMode):
    """Names of the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def reductions(rank: int) -> Outcome:
    net = sharded(network("fp8_rowwise"))
    gather_codes(net)
    with Collectives() as forward:
        loss = net(batch(rank, 0)).sum()
    with Collectives() as backward:
        loss.backward()
    with Collectives() as part:
        net[0](batch(rank, 0))
    return {"forward": forward.names, "backward": backward.names, "part": part.names}


def stack(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(width, 4, causal=False) for _ in range(2)))
    return net


def traffic(rank: int) -> Outcome:
    """Of one step of two blocks of width 256; the plain ones are counted, not computed."""
    outcome = {}
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        for gathers in ("codes", "fp32", "bf16"):
            net = stack(256)
            mixprec.convert(net, recipe)
            sharded(net, **({"mp_policy": BF16_GATHERS} if gathers == "bf16" else {}))
            if gathers == "codes":
                gather_codes(net)
            with count_gathers(net) as count:
                net(torch.randn(2, 3, 256)).sum().backward()
            outcome[f"{recipe} {gathers}"] = count.traffic().to_dict()
    return outcome


def watched(rank: int) -> Outcome:
    found = []
    for in_codes in (False, True):
        net = sharded(network("fp8_rowwise"))
        if in_codes:
            gather_codes(net)
        with mixprec.watch(net, every=1) as watcher:
            net(batch(rank, 0)).sum().backward()
            found.append(repr(watcher.step()))
    return {"same": found[0] == found[1]}


def faults(rank: int) -> Outcome:
    """A NaN among the rows of one rank is found by all."""
    net = sharded(network("fp8_rowwise"))
    if rank == 1:
        with torch.no_grad():
            net[1].second.weight.to_local()[0, 2] = torch.nan
    gather_codes(net)
    return {"found": first_fault(net, batch(rank, 0), net)}


def refusals(rank: int) -> Outcome:
    def message(function: Callable[[], Any]) -> str:
        try:
            function()
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    plain, late, twice, other = (network("fp8_rowwise") for _ in range(4))
    sharded(late)(batch(rank, 0))
    gather_codes(sharded(twice))
    gather_codes(sharded(other))
    other(batch(rank, 0)).sum().backward()
    mixprec.convert(other[:2], "fp8_tensorwise")
    outcome = {
        "plain": message(lambda: gather_codes(plain)),
        "late": message(lambda: gather_codes(late)),
        "twice": message(lambda: gather_codes(twice)),
        "other": message(lambda: other(batch(rank, 0))),
    }
    twice.unshard()
    outcome["read"] = message(lambda: twice[3].weight.sum())
    return outcome


JOBS: dict[int, tuple[Job, ...]] = {
    2: (
        same_training,
        same_operands,
        reductions,
        checkpoints,
        same_training_under_settings,
        reports,
        traffic,
        watched,
        faults,
        refusals,
    ),
    # some of which have no rows of some weights
    3: (same_training, same_operands, reductions),
}


@pytest.fixture(params=JOBS)
def on_ranks(request: pytest.FixtureRequest, results_of: Callable[[int], Results]) -> Results:
    """Two ranks, then three."""
    return results_of(request.param)


def test_training_has_the_bits_of_ordinary_gathers(on_ranks: Results) -> None:
    for found in on_ranks(same_training):
        assert [recipe for recipe, is_same in found.items() if not is_same] == []
        assert "fp8_rowwise" in found


def test_settings_of_fsdp_and_of_the_model_change_nothing(on_two: Results) -> None:
    for found in on_two(same_training_under_settings):
        assert [case for case, is_same in found.items() if not is_same] == []
        assert {case.partition(", ")[2] for case in found} == set(CASES) - {"as it is"}


def test_codes_and_scales_are_those_of_the_whole_weight(on_ranks: Results) -> None:
    for found in on_ranks(same_operands):
        assert list(found) == [f"{recipe}, NaN {nan}" for recipe in GATHERED for nan in (0, 1)]
        for layers in found.values():
            assert layers == [[f"seen {W_OUTPUT}", f"seen {W_GRAD_INPUT}"]] * 5


def test_recipes_that_need_more_than_codes_are_left_and_told_of(on_two: Results) -> None:
    names = ["0.first", "0.second", "1.first", "1.second", "3"]
    for found in on_two(reports):
        for recipe, report in found.items():
            is_gathered = recipe in GATHERED
            assert report["gathered"] == [f"{name}.weight" for name in names if is_gathered]
            assert list(report["left"]) == [name for name in names if not is_gathered]
            assert len(report["warnings"]) == (not is_gathered)
        assert "bits, not 8" in found["nvfp4"]["left"]["3"]
        assert "blocks of (1, 32)" in found["mxfp8"]["left"]["3"]


def test_checkpoints_do_not_know_of_codes(on_two: Results) -> None:
    for found in on_two(checkpoints):
        assert len(found) == 8
        assert all(found.values())


def test_amaxes_of_all_weights_are_reduced_once_a_forward_pass(on_ranks: Results) -> None:
    for found in on_ranks(reductions):
        assert found["forward"].count("all_reduce") == 1
        assert "all_reduce" not in found["backward"]
        # a part of the model that is called by itself: its two weights
        assert found["part"].count("all_reduce") == 2


def test_a_quarter_of_the_bytes_of_fp32_and_half_of_those_of_bf16(on_two: Results) -> None:
    for found in on_two(traffic):
        for recipe in ("fp8_tensorwise", "fp8_rowwise"):
            codes, fp32, bf16 = (found[f"{recipe} {name}"] for name in ("codes", "fp32", "bf16"))
            assert codes["bytes"] <= 0.27 * fp32["bytes"]
            assert codes["bytes"] <= 0.53 * bf16["bytes"]
            assert codes["fp32_bytes"] == fp32["fp32_bytes"] == fp32["bytes"]
            assert codes["bf16_bytes"] == bf16["bf16_bytes"] == bf16["bytes"]


def test_watching_gathers_what_it_compares_with(on_two: Results) -> None:
    assert all(found["same"] for found in on_two(watched))


def test_weight_that_is_not_finite_is_named_by_all_ranks(on_two: Results) -> None:
    assert [found["found"] for found in on_two(faults)] == ["parameter 1.second.weight"] * 2


def test_refusals_name_the_way_out(on_two: Results) -> None:
    for found in on_two(refusals):
        assert "call mixprec.convert, then fully_shard, then gather_codes" in found["plain"]
        assert "before the first forward pass" in found["late"]
        assert "once" in found["twice"]
        assert "another recipe than fp8_rowwise" in found["other"]
        assert "where they are sharded" in found["read"]
