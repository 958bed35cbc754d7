"""A model that several ranks train: replicated (DDP) or in shards (FSDP2), with gradients summed.

Layers see whole weights, in the parameters' own type and values, and the rows of their rank;
gradients are summed over ranks in float32 or wider and not averaged, since each rank's loss is
divided by the rows of the whole step already.

Sources: torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp.fully_shard (FSDP2).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mixprec.amp.autocast import DTYPES
from mixprec.amp.setup import stays_wide
from mixprec.nn import Traffic, count_gathers, distribute, gather_codes
from mixprec.nn.gathering import gathers_codes
from mixprec.nn.state import converted_layers
from mixprec.optim import MixedPrecision
from mixprec.recipes import Recipe
from mixprec.train.config import Config
from mixprec.train.distributed import Ranks


def reduces(ranks: Ranks) -> bool:
    """Whether torch sums the gradients over ranks, for which they have the parameters' types."""
    return ranks.strategy == "fsdp" or ranks.size > 1


def spread(model: nn.Module, ranks: Ranks, recipe: Recipe) -> None:
    """Tell the layers that their rows are spread over the ranks; leave each its shards of `fsdp`.

    Sharded parameters are DTensors afterwards, split along their first axis. A block of the model,
    a child of its ModuleLists and Sequentials, is gathered for its forward and its backward pass
    and let go again, the rest of the model as one. Parameters are of one type in each part: those
    that the recipe leaves in another are parts of their own.
    """
    if ranks.size > 1:
        distribute(model)
    if ranks.strategy != "fsdp":
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # of outputs changed in place, which no criterion does to what it is given
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # a rank that built another model than the first would train a mixture
    ranks.take_from_first([*model.parameters(), *model.buffers()])
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    wide = torch.promote_types(DTYPES[recipe.parameters], torch.float32)
    policy = MixedPrecisionPolicy(reduce_dtype=wide, cast_forward_inputs=False)
    apart = [module for module in model.modules() if stays_wide(module, recipe)]
    for module in (*apart, *blocks(model), model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # torch 2.13; before, a branch that only some ranks take leaves the others waiting
        if hasattr(sharded, "set_reduce_scatter_unused_params"):
            sharded.set_reduce_scatter_unused_params(True, recurse=False)


def statistics(model: nn.Module) -> list[Tensor]:
    """The running statistics of batches, which each rank has of its own rows."""
    found = (m for m in model.modules() if getattr(m, "running_mean", None) is not None)
    return [buffer for module in found for buffer in module.buffers(recurse=False)]


def share_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Take over the first rank's running statistics, as DDP does."""
    if ranks.size > 1:
        ranks.take_from_first(statistics(model))


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The parts that are gathered one at a time: children of its outermost lists of modules.

    One that shares a parameter with another part is left to the whole.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for module in _outermost_lists(model):
        for child in module.children():
            own = Counter(id(p) for _, p in child.named_parameters(remove_duplicate=False))
            if own and all(uses[key] == count for key, count in own.items()):
                yield child


def _outermost_lists(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.Sequential):
        yield module
        return
    for child in module.children():
        yield from _outermost_lists(child)


def callable_of(model: nn.Module, ranks: Ranks, config: Config) -> nn.Module:
    """What to call for a forward pass: the model, in DistributedDataParallel with several ranks.

    A sharded model's weights are gathered in codes from now on, where the configuration and the
    recipes allow it; compiled code gathers parameters.
    """
    is_asked = ranks.strategy == "fsdp" and config.distributed.gather == "codes"
    is_eager = config.train.compile is False
    if is_asked and is_eager and any(converted_layers(model)) and not gathers_codes(model):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)
            gather_codes(model)
    if ranks.strategy != "ddp" or ranks.size == 1:
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    with warnings.catch_warnings():
        # torch 2.13 has another name for it, which earlier ones do not know
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            broadcast_buffers=False,
            # a branch that only some ranks take would leave the others waiting
            find_unused_parameters=True,
        )
    wrapped.register_comm_hook(None, _sum)
    return wrapped


class GatherFigure:
    """What the gathers of a sharded model's first step here send; costs later steps nothing.

    Attributes:
        traffic: None before that step, where nothing is gathered, and in compiled code, into which
            no counter may look.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, config: Config) -> None:
        is_counted = ranks.strategy == "fsdp" and ranks.size > 1 and config.train.compile is False
        self._model = model if is_counted else None
        self.traffic: Traffic | None = None

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """A context for the forward and backward passes of each step."""
        if self._model is None:
            yield
            return
        with count_gathers(self._model) as counter:
            yield
        self._model, self.traffic = None, counter.traffic()


def _sum(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over ranks, in float32 at least."""
    own = bucket.buffer()
    wide = own.to(torch.promote_types(own.dtype, torch.float32))
    work = dist.all_reduce(wide, async_op=True)
    done = work.get_future()
    return done.then(lambda future: future.value()[0].to(own.dtype))


def gradients(forward: Callable[..., Any], *, summed: bool) -> AbstractContextManager[Any]:
    """For a batch of a step: whether its gradients, and those before, are summed over ranks yet."""
    if not summed and isinstance(forward, DistributedDataParallel):
        return forward.no_sync()
    return nullcontext()


def widen(optimizer: torch.optim.Optimizer, ranks: Ranks, *, summed: bool) -> None:
    """After a batch of a step: have gradients of 16-bit parameters in float32, as the next adds to.

    DDP adds batches up in the parameters' type, which it sums over ranks, and is left until then.
    """
    if isinstance(optimizer, MixedPrecision) and (summed or ranks.strategy != "ddp"):
        optimizer.widen_gradients()


def mesh_of(model: nn.Module) -> Any:
    """The device mesh that a model's parameters are in shards on; None where they are whole."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return next((mesh for mesh in meshes if mesh is not None), None)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that ranks may hold in shards; each of them calls this."""
    # by its method: importing DTensor's module takes longer than everything before it
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save(state: Mapping[str, Tensor], ranks: Ranks, path: Path) -> None:
    """A model's state_dict, whole, in a file for `torch.load(weights_only=True)`.

    Raises: OSError: It cannot be written, on every rank.
    """
    tensors = {name: whole(tensor).cpu() for name, tensor in state.items()}

    def write() -> None:
        # a path would have torch tell of a full disk in words of its own
        with path.open("wb") as file:
            torch.save(tensors, file)

    ranks.at_first(write)
