"""Converted layers within torch's wrappers for several ranks: DDP and ``fully_shard``."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixprec.nn.layer import QuantizedLayer, is_numerics_buffer

# what DDP asks of the module that it wraps; the names count from there
_LEFT_OUT = "_ddp_params_and_buffers_to_ignore"


def leave_out_of_broadcasts(model: nn.Module) -> None:
    """Let DDP around any module of a model leave the numerics state to each rank.

    It would overwrite what the other ranks recorded by rank 0's before each forward; ranks agree on
    the state at the end of each step, by the maximum.
    """
    for module in model.modules():
        given = getattr(module, _LEFT_OUT, [])
        others = [name for name in given if not is_numerics_buffer(name)]
        names = [*others, *_state_names(module)]
        if names and names != given:
            setattr(module, _LEFT_OUT, names)
        elif not names and _LEFT_OUT in vars(module):
            delattr(module, _LEFT_OUT)


def _state_names(module: nn.Module) -> list[str]:
    return [
        f"{name}.{buffer}".lstrip(".")
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, QuantizedLayer)
        for buffer in layer.numerics_buffers()
    ]


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is DDP's around a model, which is no module of the model."""
    return isinstance(module, DistributedDataParallel)


def sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class to which ``fully_shard`` gave this one as a subclass; any other class itself."""
    bases = kind.__bases__
    return bases[1] if bases[0].__name__ == "FSDPModule" else kind
