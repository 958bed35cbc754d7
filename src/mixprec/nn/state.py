"""Numerics state of converted models: rolling amax histories, saving and loading them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mixprec.nn.layer import QuantizedLayer
from mixprec.scaling import DelayedState, discard_pending, join_state, roll_history, split_state

_ATTACHED: WeakKeyDictionary[torch.optim.Optimizer, list[ReferenceType[nn.Module]]] = (
    WeakKeyDictionary()
)


def converted_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLayer]]:
    """The converted layers by name, each once."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            yield name, module


def _histories(model: nn.Module) -> dict[tuple[int, torch.device], list[tuple[str, Tensor]]]:
    """Packed states by length and device, so that a step costs a few operations in all."""
    groups = defaultdict(list)
    for name, layer in converted_layers(model):
        for buffer_name, buffer in layer.numerics_buffers().items():
            if buffer.is_floating_point() and not buffer.is_meta:
                key = (len(buffer), buffer.device)
                groups[key].append((f"{name}.{buffer_name}".lstrip("."), buffer))
    return groups


@torch.no_grad()
def sync_scales(model: nn.Module, *, skipped: bool = False) -> None:
    """Roll the amax histories of delayed scaling; call it once after each optimizer step.

    Each operand's pending amax, the maximum over micro-batches and ranks, enters its history, from
    which the next scales are made. Other frameworks call it sync_float8_amax_and_scale_history.
    Counts of noise steps become the largest of any rank.

    Args:
        model: A model with converted layers; others are left alone.
        skipped: The optimizer skipped this step: forget what it recorded, roll nothing.

    Warns:
        UserWarning: An amax was not finite; it is not entered, and the operands are named.

    Edge cases: an operand that was not used keeps its history. With ``torch.distributed``
    initialised, all ranks have to call it.
    """
    nonfinite = _end_step(model, discard_pending if skipped else roll_history)
    if nonfinite:
        warnings.warn(
            f"amax: got NaN or inf in {', '.join(nonfinite)}; a history holds finite amaxes only, "
            "they were left out; look for the first layer with a non-finite value",
            stacklevel=2,
        )


@torch.no_grad()
def forget_amaxes(model: nn.Module) -> None:
    """``sync_scales(model, skipped=True)`` without its warning.

    For a caller that says itself what was not finite, as a loss scaler does: an overflow is part
    of how it works.
    """
    _end_step(model, discard_pending)


def _end_step(model: nn.Module, change: Callable[[DelayedState], DelayedState]) -> list[str]:
    """Change every history as its pending amax asks; the names of those that were not finite."""
    nonfinite = []
    is_shared = dist.is_available() and dist.is_initialized()
    for group in _histories(model).values():
        packed = torch.stack([buffer for _, buffer in group])
        if is_shared:
            recorded = packed[:, -2:].contiguous()
            dist.all_reduce(recorded, op=dist.ReduceOp.MAX)
            packed[:, -2:] = recorded
        state = split_state(packed)
        counts = state.nonfinite.tolist()
        nonfinite += [name for (name, _), count in zip(group, counts, strict=True) if count]
        torch._foreach_copy_([buffer for _, buffer in group], list(join_state(change(state))))
    if is_shared:
        _agree_on_noise(model)
    for _, layer in converted_layers(model):
        layer.forget_weight()
    return nonfinite


def _agree_on_noise(model: nn.Module) -> None:
    """Count on every rank the passes of the one that made most, if a branch was idle on others."""
    groups = defaultdict(list)
    for _, layer in converted_layers(model):
        for buffer in layer.numerics_buffers().values():
            if not buffer.is_floating_point() and not buffer.is_meta:
                groups[buffer.device].append(buffer)
    for steps in groups.values():
        counts = torch.stack(steps)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        torch._foreach_copy_(steps, list(counts))


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> RemovableHandle:
    """Call ``sync_scales(model)`` after each step that the optimizer takes.

    Args:
        model: The converted model.
        optimizer: The optimizer of its parameters.

    Returns:
        A handle whose ``remove()`` ends it.
    """

    def roll(*_: object) -> None:
        sync_scales(model)

    _ATTACHED.setdefault(optimizer, []).append(ref(model))
    return optimizer.register_step_post_hook(roll)


def attached_models(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The models that ``attach`` was called for with this optimizer, as far as they still exist.

    A wrapper of an optimizer (``inner``) has those of both.
    """
    chain = (optimizer, getattr(optimizer, "inner", optimizer))
    models = [reference() for each in chain for reference in _ATTACHED.get(each, [])]
    return list({id(model): model for model in models if model is not None}.values())


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The numerics state of a converted model, which ``model.state_dict()`` leaves out.

    Returns:
        ``layer.buffer`` -> a tensor that shares its memory with the layer's: amax histories with
        what is pending, and counts of noise steps. Empty for recipes without state.
    """
    return {
        f"{name}.{buffer_name}".lstrip("."): buffer.detach()
        for name, layer in converted_layers(model)
        for buffer_name, buffer in layer.numerics_buffers().items()
    }


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over what ``mixprec.state_dict`` gave for a model converted by the same recipes.

    Raises:
        ValueError: A key that is missing or unknown, or a tensor of another shape; nothing is
            loaded then.
    """
    own = state_dict(model)
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            f"state: got missing keys {missing} and unknown keys {unknown}; it must come from a "
            "model converted by the same recipes; convert the model first"
        )
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"state: got shape {tuple(state[name].shape)} for {name}; must be "
                f"{tuple(tensor.shape)}; convert with the same amax_history_len"
            )
    for name, tensor in own.items():
        tensor.copy_(state[name])
    for _, layer in converted_layers(model):
        layer.forget_weight()
