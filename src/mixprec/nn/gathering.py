"""FSDP2 gathers weights in the codes that their products take: a byte a weight on the wire.

``fully_shard`` leaves rank r the rows n_r of a weight w[N, K]. Before a layer runs, it gathers

    codes of w[N, K]     round(w[n_r, K] * encode)        in forward, for output
    codes of w.T[K, N]   round(w[n_r, K].T * encode)      in backward, for grad_input

in place of w: every element is rounded where it lives. Where both products take the same values
(one scale a tensor) both gathers carry the first. The scales are made of the amaxes of the whole
weight, which are reduced over ranks for all weights at once when a forward pass begins: codes and
scales are those of the weight gathered in full and quantised then, bit for bit.

The parameters stay what ``fully_shard`` made of them: checkpoints, optimizers and averages see
ordinary sharded tensors. The extension points are torch's, ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``, put on each weight's local tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from mixprec.gathered_weight import GatheredWeight
from mixprec.nn.layer import QuantizedLayer
from mixprec.nn.linear import QuantizedLinear
from mixprec.nn.sharded_codes import ShardedCodes, Shards, codings, largest
from mixprec.nn.state import converted_layers
from mixprec.recipes import Recipe

_WEIGHTS: Mapping[Callable[..., Any], str] = MappingProxyType({QuantizedLinear.forward: "weight"})
"""Forward passes that multiply by a parameter [N, K] as it is, and the parameter's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherReport:
    """Which weights are gathered in codes.

    Args:
        gathered: Names of the parameters that are.
        left: Converted layers whose parameters are gathered as they are -> why.
    """

    gathered: tuple[str, ...]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.gathered)} gathered in codes, {len(self.left)} as they are"]
        lines += [f"  {name}: codes" for name in self.gathered]
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.left.items())])


class ModelGather:
    """The weights of a model that are gathered in codes, and the one reduction of their amaxes."""

    def __init__(self, model: nn.Module, weights: Mapping[str, ShardedCodes]) -> None:
        self.weights = weights
        self._owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in weights}
        # as FSDP2's own hooks, no part of a graph
        model.register_forward_pre_hook(torch.compiler.disable(self._begin), prepend=True)
        model.register_forward_hook(torch.compiler.disable(self._end), always_call=True)
        # a caller may let FSDP2 gather before the first forward pass
        self.put_hooks()

    def _begin(self, *_: object) -> None:
        # what checkpointing runs again in backward has the scales of its forward
        if torch._C._current_graph_task_id() == -1:
            self.put_hooks()
            self._reduce()

    def put_hooks(self) -> None:
        """Let FSDP2 find the weights, whose local tensors loading and moving may replace."""
        for name, weight in self.weights.items():
            parameter = self._owners[name]._parameters[name.rpartition(".")[2]]
            if not isinstance(parameter, GatheredWeight):
                weight.put_hooks(parameter._local_tensor)  # type: ignore[union-attr]

    def _end(self, *_: object) -> None:
        for weight in self.weights.values():
            weight.is_reduced = False

    @torch.inference_mode(False)
    @torch.no_grad()
    def _reduce(self) -> None:
        """Amaxes of all weights, the maximum over ranks, in one collective a process group."""
        groups: dict[dist.ProcessGroup, list[ShardedCodes]] = {}
        for weight in self.weights.values():
            groups.setdefault(weight.shards.group, []).append(weight)
        for group, weights in groups.items():
            own = [weight.own_amaxes() for weight in weights]
            whole = largest(torch.cat(own), group)
            for weight, amaxes in zip(weights, whole.split([len(x) for x in own]), strict=True):
                weight.take_amaxes(amaxes)
                weight.is_reduced = True


_GATHERS: WeakKeyDictionary[nn.Module, ModelGather] = WeakKeyDictionary()


def gathered_weights(model: nn.Module) -> list[ShardedCodes]:
    """The weights of a model that are gathered in codes; none where nobody asked for it."""
    return list(_GATHERS[model].weights.values()) if model in _GATHERS else []


def gathers_codes(model: nn.Module) -> bool:
    """Whether ``gather_codes`` was called for a model."""
    return model in _GATHERS


def gather_codes(model: nn.Module) -> GatherReport:
    """Let FSDP2 gather the weights of converted layers in codes; numbers stay what they are.

    Call it once, after ``mixprec.convert`` and after all of ``fully_shard``, on the module whose
    forward is called, before its first forward pass.

    A weight is gathered in codes where its recipe quantises it for both products, to formats of 8
    bits, with one scale a tensor or a row (of data at hand or of a history), rounded to nearest.
    Every rank gathers (W - 1) / W * N * K bytes a gather, W the number of ranks.

    Args:
        model: A converted model whose parameters are sharded along their first axis.

    Returns:
        A report: which weights, and why not the others.

    Raises:
        ValueError: No converted layer, or none with a sharded weight; a model that has run.

    Warns:
        UserWarning: No weight can be gathered in codes.

    Edge cases: rows that do not divide among the ranks, ranks without rows, frozen weights; a
    weight that several layers share, where all take it alike. What needs codes that a gather did
    not bring (``reshard_after_forward=False`` under scales a row, which the root has by default;
    activation checkpointing under them) gathers them when it does, weight by weight. Products of
    these layers are eager in compiled code.
    """
    layers = dict(converted_layers(model))
    _check_can_begin(model, layers.values())
    owners = _owners(model)
    weights: dict[str, ShardedCodes] = {}
    names, left = [], {}
    for name, layer in layers.items():
        found = _sharded_codes(layer, owners)
        if isinstance(found, str):
            left[name] = found
            continue
        names.append(f"{name}.{_weight_name(layer)}".lstrip("."))
        # a weight that layers share is one
        if all(found.local is not weight.local for weight in weights.values()):
            weights[names[-1]] = found
        # Dynamo would lose the gradients of what has no elements
        layer.multiply = torch.compiler.disable(  # type: ignore[method-assign]
            layer.multiply, reason="products of a weight gathered in codes are eager"
        )
    if not names:
        warnings.warn(
            "gather_codes: no weight is gathered in codes; print the report for why", stacklevel=2
        )
    _GATHERS[model] = ModelGather(model, weights)
    return GatherReport(gathered=tuple(names), left=MappingProxyType(left))


def _check_can_begin(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    if not any(hasattr(p, "device_mesh") for layer in layers for p in layer.parameters()):
        raise ValueError(
            "model: got no converted layer with a sharded weight; weights are gathered where they "
            "are sharded; call mixprec.convert, then fully_shard, then gather_codes"
        )
    if _has_run(model) or gathers_codes(model):
        raise ValueError(
            "model: got one that has run, or gathers codes already; how a weight is gathered is "
            "settled by then; call gather_codes once, before the first forward pass"
        )


def _has_run(model: nn.Module) -> bool:
    """Whether FSDP2 has settled which of the modules is the root, as it does when it first runs."""
    states = (getattr(module, "_get_fsdp_state", lambda: None)() for module in model.modules())
    return any(getattr(state, "_is_root", None) is not None for state in states)


def _owners(model: nn.Module) -> dict[int, list[nn.Module]]:
    """For each parameter, the modules that hold it."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return owners


def _weight_name(layer: nn.Module) -> str | None:
    # fully_shard and a user may have derived a class; a forward of its own may read the weight
    return _WEIGHTS.get(type(layer).forward)


def _sharded_codes(
    layer: QuantizedLayer, owners: Mapping[int, list[nn.Module]]
) -> ShardedCodes | str:
    """How a layer's weight is gathered, or why it is left as it is."""
    name = _weight_name(layer)
    if name is None:
        return "it multiplies by parts of its parameters"
    weight = layer._parameters.get(name)
    if weight is None:
        return "its weight is computed from other parameters"
    sharing = owners[id(weight)]
    if why := next(_why_not(layer.recipe), None) or _why_not_shared(sharing, layer.recipe):
        return why
    shards = Shards.of(weight)
    if isinstance(shards, str):
        return shards
    return ShardedCodes(recipe=layer.recipe, shards=shards, local=weight._local_tensor)  # type: ignore[attr-defined]


def _why_not(recipe: Recipe) -> Iterator[str]:
    """What about a recipe keeps a weight from being gathered in codes."""
    for spec in codings(recipe):
        if spec is None:
            yield "a product takes it in high precision"
        elif spec.format.bits != 8:
            yield f"{spec.format} has {spec.format.bits} bits, not 8"
        elif spec.block not in ((-1, -1), (1, -1)):
            yield f"blocks of {spec.block} may lie on several ranks"
        elif spec.scale_rule == "none" or spec.hadamard or spec.is_stochastic:
            yield "it is not only scaled and rounded to nearest"


def _why_not_shared(sharing: list[nn.Module], recipe: Recipe) -> str | None:
    if len(sharing) == 1:
        return None
    is_alike = all(getattr(module, "recipe", None) == recipe for module in sharing)
    is_delayed = any(spec is not None and spec.is_delayed for spec in codings(recipe))
    if is_alike and not is_delayed and all(map(_weight_name, sharing)):
        return None
    return "a module that shares it takes it otherwise"
