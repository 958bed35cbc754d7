"""Which operation runs in which type, and the region in which that holds.

    16-bit     inputs rounded to the region's type; the result has it
    fp32       inputs of 16 bits widened; the result is float32
    widest     inputs widened to the widest of their types
    as statistics  parameters get the type of the running statistics; the result follows the input
    otherwise  an operation follows its inputs

The same tables on every device. Where a device has no fast units of 16 bits, a product of 16-bit
inputs is computed in FP32 from the rounded inputs and its result rounded once, in forward and
backward: the same numbers, at the speed of FP32.

Sources: the operations that PyTorch registers for autocast on CUDA and on CPU (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mixprec.gemm.widening import NARROW, has_fast_units, mapped, widened
from mixprec.modes import is_autocast_on, is_called_by_compiled_code
from mixprec.operation import Operation
from mixprec.recomputation import Hooks, hooks_around, let_reentrant_recompute, surrounding_hooks

Rule = Literal["16-bit", "fp32", "fp32 result", "widest", "as statistics", "refused"]
F = TypeVar("F", bound=Callable[..., Any])
FOLLOWS = "follows its inputs"
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "16-bit": "inputs rounded to {dtype}; the result is {dtype}",
        "fp32": "inputs of 16 bits widened; the result is fp32",
        "fp32 result": "as fp32, unless the call names the type of its result",
        "widest": "inputs of several types widened to fp32, of one type left",
        "as statistics": "parameters in the type of the running statistics; follows its input",
        "refused": "an error: no digits are left near 0 and 1; use it with logits",
        FOLLOWS: "computes and results in the type of its inputs",
    }
)
"""What each rule means, in a line; ``{dtype}`` is the region's type."""

_LOW_EVERYWHERE = """conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution _convolution prelu addmm addbmm baddbmm bmm mm matmul __rmatmul__
    matrix_power linalg_matrix_power linalg_matmul chain_matmul linalg_multi_dot einsum linear
    linalg_vecdot lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention"""
_LOSSES = """nll_loss nll_loss2d nll_loss_nd cross_entropy_loss ctc_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss cosine_embedding_loss
    poisson_nll_loss binary_cross_entropy_with_logits"""
# torch has no transforms of 16 bits on a CPU
_FOURIER = """fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn
    fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn
    stft"""


def _table(rules: Mapping[Rule, str]) -> Mapping[str, Rule]:
    return MappingProxyType({name: rule for rule, names in rules.items() for name in names.split()})


POLICIES: Mapping[str, Mapping[str, Rule]] = MappingProxyType(
    {
        "cuda": _table(
            {
                "16-bit": f"""{_LOW_EVERYWHERE} addmv addr mv""",
                "fp32": f"""{_LOSSES} {_FOURIER} acos arccos asin arcsin cosh erfinv exp expm1
                    log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus __rpow__
                    __rdiv__ layer_norm native_layer_norm rms_norm group_norm norm
                    frobenius_norm nuclear_norm cosine_similarity dist pdist cdist renorm
                    logsumexp special_expm1 special_log1p special_logsumexp special_erfinv
                    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
                    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
                    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
                    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
                "fp32 result": """prod softmax log_softmax special_softmax special_log_softmax
                    cumprod cumsum linalg_norm linalg_vector_norm linalg_matrix_norm sum""",
                "widest": """addcdiv addcmul atan2 arctan2 bilinear cross linalg_cross dot vdot
                    inner grid_sampler index_put tensordot scatter_add""",
                "as statistics": "batch_norm instance_norm",
                "refused": "binary_cross_entropy",
            }
        ),
        "torch_cpu": _table(
            {
                "16-bit": f"{_LOW_EVERYWHERE} _addmm_activation tensordot",
                "fp32": f"""{_LOSSES} {_FOURIER} binary_cross_entropy adaptive_avg_pool3d
                    adaptive_max_pool3d avg_pool3d max_pool3d fractional_max_pool2d
                    fractional_max_pool3d max_unpool2d max_unpool3d reflection_pad1d
                    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d cdist
                    grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback
                    polar prod quantile nanquantile view_as_complex trace cholesky cholesky_inverse
                    cholesky_solve inverse pinverse qr svd geqrf orgqr ormqr lu_solve _lu_with_info
                    triangular_solve linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig
                    linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product
                    linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve
                    linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
                    fake_quantize_per_tensor_affine multilabel_margin_loss_forward""",
                "widest": "cat concat concatenate stack index_copy",
                "as statistics": "batch_norm instance_norm",
            }
        ),
    }
)
"""Rule by operation, as torch names it, under each policy."""
_PRODUCTS = frozenset(
    {name for name, rule in POLICIES["cuda"].items() if rule == "16-bit"}
    | {"bilinear", "dot", "vdot", "inner", "tensordot", "_addmm_activation"}
)
_WIDE: tuple[Rule, ...] = ("fp32", "fp32 result")
_CHANGEABLE = (torch.float32, *NARROW)
# torch's recurrent layers refuse an input of another type than their weights' unless they find
# autocast on, for any device
_UNUSED_DEVICE = "ipu"
_OUTSIDE_BACKWARD = -1
_graph_task = torch._C._current_graph_task_id


def uncompiled(function: F) -> F:
    """Let torch.compile run a function as it stands where eager code calls it.

    Steps of a region that Dynamo compiles by themselves lose the mode that they are in, and their
    results. Within a compiled function that is called in a region they are traced all the same.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)
    return function


class Region(TorchFunctionMode):
    """A stretch of code whose operations follow a policy; entered once, in one thread.

    It sees torch's operations before autograd does, so that casts have gradients. In-place
    operations, those with ``out=`` and float64 are left alone, and nothing is cached: a weight that
    changes inside the region takes effect at its next use.

    Args:
        dtype: bfloat16 or float16; None changes nothing, inside another region either.
        policy: A name in ``POLICIES``.
        record: Called with each operation that has floating-point results, also in the regions
            inside that record nothing themselves.
    """

    def __init__(
        self,
        dtype: torch.dtype | None,
        policy: str = "cuda",
        record: Callable[[Operation], None] | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self._policy = policy
        self._rules = POLICIES[policy] if dtype is not None else {}
        self._record = record
        self._outer: Region | None = None
        self._is_innermost = True
        self._was_announced = False
        self._hooks_at_entry: Hooks | None = None
        self._had_gradients = True
        self._graph_task = _OUTSIDE_BACKWARD

    @uncompiled
    def __enter__(self) -> Self:
        self._outer = innermost_region()
        if self._outer is not None:
            self._outer._is_innermost = False
            self._record = self._record or self._outer._record
        self._was_announced = torch.is_autocast_enabled(_UNUSED_DEVICE)
        torch.set_autocast_enabled(_UNUSED_DEVICE, self.dtype is not None)
        self._hooks_at_entry = surrounding_hooks()
        self._had_gradients = torch.is_grad_enabled()
        self._graph_task = _graph_task()
        super().__enter__()
        return self

    @uncompiled
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_autocast_enabled(_UNUSED_DEVICE, self._was_announced)
        if self._outer is not None:
            self._outer._is_innermost = True
        self._outer = self._hooks_at_entry = None

    @uncompiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._is_innermost and self.is_running()):
            return func(*args, **kwargs)
        body = BODIES.get(func)
        if body is not None:
            # an operation written in Python: its steps have rules of their own
            with self._again():
                return body(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "unflatten":
            # the method calls super(), which Dynamo cannot trace from here
            func = torch.unflatten
        is_plain = name not in self._rules and (self.dtype is None or name not in _PRODUCTS)
        is_bare = (is_plain and self._record is None) or kwargs.get("out") is not None
        if is_bare and not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and is_called_by_compiled_code():
            return func(*args, **kwargs)
        with self.recomputed():
            return func(*args, **kwargs) if is_bare else self._run(func, name, args, kwargs)

    def is_running(self) -> bool:
        """Whether what runs is of the pass that entered the region, not a backward pass within."""
        return torch.compiler.is_compiling() or self._graph_task == _graph_task()

    def recomputed(self) -> AbstractContextManager[None]:
        """A stretch that runs in this region, or its like, whenever a checkpoint recomputes it."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return nullcontext()
        around = partial(Region, self.dtype, self._policy)
        if not torch.is_grad_enabled():
            if self._had_gradients:
                let_reentrant_recompute(around)
            return nullcontext()
        hooks = surrounding_hooks()
        if hooks is None:
            return nullcontext()
        if self._hooks_at_entry == hooks:
            # entered by the checkpointed function itself, which will enter it again
            return nullcontext() if self._outer is None else self._outer.recomputed()
        return hooks_around(hooks, around)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """The region active inside one of its own operations, where torch suspends it."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    @uncompiled
    def _run(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        found = list(_tensors((args, kwargs)))
        tensors = [x for x in found if x.dtype in _CHANGEABLE]
        if not tensors or is_autocast_on(tensors[0]):
            out = func(*args, **kwargs)
            self._note(name, found, tuple(dict.fromkeys(x.dtype for x in found)), out, FOLLOWS)
            return out
        rule = self._rules.get(name)
        if rule == "fp32 result" and kwargs.get("dtype") is not None:
            rule = None
        cast = self._cast_dtype(name, rule, tensors)
        if cast is not None:
            args, kwargs = mapped((args, kwargs), lambda x: x.to(cast), _CHANGEABLE)
        if rule == "as statistics":
            args = _like_statistics(*args)
        dtypes = (cast,) if cast is not None else tuple(dict.fromkeys(x.dtype for x in tensors))
        is_narrow = len(dtypes) == 1 and dtypes[0] in NARROW and name in _PRODUCTS
        if is_narrow and self.dtype is not None and not has_fast_units(tensors[0]):
            out = widened(func, args, kwargs, dtypes[0])
        else:
            out = func(*args, **kwargs)
        self._note(name, tensors, dtypes, out, rule or FOLLOWS)
        return out

    def _note(
        self,
        name: str,
        inputs: list[Tensor],
        compute: tuple[torch.dtype, ...],
        out: Any,
        rule: str,
    ) -> None:
        # an assignment to elements returns nothing, and changes the first tensor
        outputs = tuple(x.dtype for x in _tensors(inputs[:1] if name == "__setitem__" else out))
        if self._record is not None and inputs and outputs:
            given = tuple(x.dtype for x in inputs)
            self._record(
                Operation(name=name, inputs=given, compute=compute, outputs=outputs, rule=rule)
            )

    def _cast_dtype(
        self, name: str, rule: Rule | None, tensors: list[Tensor]
    ) -> torch.dtype | None:
        """The type that inputs are cast to; None leaves them."""
        if rule == "refused":
            raise ValueError(
                f"{name}: got a call in a region of 16 bits; probabilities near 0 and 1 have no "
                f"digits left there; use {name}_with_logits, or autocast(enabled=False) and float()"
            )
        if rule == "16-bit":
            # torch multiplies sparse matrices of 16 bits on few devices, and not in backward
            is_dense = all(x.layout == torch.strided for x in tensors)
            return self.dtype if is_dense else torch.float32
        if rule in _WIDE:
            return torch.float32
        if rule == "widest" and len({x.dtype for x in tensors}) > 1:
            return torch.float32
        return None


def innermost_region() -> Region | None:
    """The region that this thread is in, or None."""
    stack = _get_current_function_mode_stack()
    return next((mode for mode in reversed(stack) if isinstance(mode, Region)), None)


def active_dtype(x: Tensor) -> torch.dtype | None:
    """The 16-bit type in which a product of x runs by a region of ours or torch's, or None."""
    if is_autocast_on(x):
        return torch.get_autocast_dtype(x.device.type)
    region = innermost_region()
    return region.dtype if region is not None and region.is_running() else None


def recorder() -> Callable[[Operation], None] | None:
    """What the region that this thread is in tells its operations to, for functions of our own."""
    region = None if torch.compiler.is_compiling() else innermost_region()
    return region._record if region is not None and region.is_running() else None


def recomputed_alike() -> AbstractContextManager[None]:
    """``Region.recomputed`` of the region that this thread is in, for functions of our own."""
    region = innermost_region()
    return nullcontext() if region is None else region.recomputed()


def _like_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    """Arguments of a normalisation whose parameters have the type of its statistics.

    No device takes 16-bit parameters beside float32 statistics, nor a wider input beside statistics
    of 16 bits, which are updated in place and so cannot be cast.
    """
    dtype = torch.float32 if mean is None else mean.dtype
    weight, bias = mapped((weight, bias), lambda p: p.to(dtype), _CHANGEABLE)
    return (x.to(dtype) if dtype in NARROW else x, weight, bias, mean, var, *rest)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of nested arguments."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _nobody_overrides(*_: Any) -> bool:
    return False


def _bodies(module: ModuleType) -> Iterator[tuple[FunctionType, FunctionType]]:
    """The operations that torch writes in Python, and each without its question who overrides it.

    Called as they are inside a mode, they would ask the mode again, without end. Methods of Tensor
    are not among them: they call their like in C, and have rules themselves.
    """
    names = {**vars(module), **dict.fromkeys(_OVERRIDE_CHECKS, _nobody_overrides)}
    for func in vars(module).values():
        if not isinstance(func, FunctionType) or func.__globals__ is not vars(module):
            continue
        if set(_OVERRIDE_CHECKS) & set(func.__code__.co_names):
            body = FunctionType(
                func.__code__, names, func.__name__, func.__defaults__, func.__closure__
            )
            body.__kwdefaults__ = func.__kwdefaults__
            yield func, body


BODIES: dict[Callable[..., Any], Callable[..., Any]] = dict(
    [*_bodies(torch.functional), *_bodies(torch.nn.functional)]
)
"""Operations that torch writes in Python, without their question who overrides them."""
