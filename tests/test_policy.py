"""The tables against what torch registers, and the types that each operation gives in a region."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixprec.policy import POLICIES, Operation, Region, active_dtype, innermost_region

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KEYS = {"cuda": "AutocastCUDA", "torch_cpu": "AutocastCPU"}
# kernels that torch chooses below the operations of Python
INNER = {
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_native_multi_head_attention",
    "mkldnn_rnn_layer",
}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"} | {
    f"{cell}_cell" for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
# made of registered ones below Python, where a region does not see them
COMPOSED = {
    "__rmatmul__", "__rpow__", "__rdiv__", "matrix_power", "linalg_matrix_power", "linalg_matmul",
    "chain_matmul", "linalg_multi_dot", "einsum", "tensordot", "inner", "linalg_cross",
    "linalg_norm", "convolution", "cross_entropy_loss", "ctc_loss", "nll_loss_nd",
}  # fmt: skip
SPELLINGS = {
    "arccos", "arcsin", "arctan2", "concat", "concatenate", "special_softmax",
    "special_log_softmax", "special_expm1", "special_log1p", "special_logsumexp",
    "special_erfinv",
}  # fmt: skip
# torch has no 16-bit transforms on a CPU
FOURIER = re.compile("stft|fft_.*")
# torch itself takes other types for the statistics than for the input on a GPU, and not on a CPU
STATISTICS = {"batch_norm", "instance_norm"}


def registered(policy: str) -> set[str]:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {n.removeprefix("aten::").split(".")[0] for n in names if has(n, KEYS[policy])}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_operation_that_torch_registers_has_a_rule(policy: str) -> None:
    found = registered(policy)
    assert len(found) > 100
    assert found - set(POLICIES[policy]) - INNER == set()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_other_operation_has_a_reason(policy: str) -> None:
    more = set(POLICIES[policy]) - registered(policy) - RECURRENT - COMPOSED - SPELLINGS
    assert {name for name in more if not FOURIER.fullmatch(name)} == STATISTICS


x, y = torch.randn(4, 8), torch.randn(8, 4)
x16 = x.bfloat16()
square = torch.randn(4, 4)
integers = torch.ones(2, 2, dtype=torch.int32)
positive = torch.rand(4, 8).bfloat16() / 2 + 0.25
labels = torch.tensor([0, 1, 2, 3])
LOW: dict[str, Callable[[], Any]] = {
    "@": lambda: x @ y,
    "matmul of 4 dimensions": lambda: torch.randn(2, 3, 4, 5) @ torch.randn(5, 6),
    "reflected @": lambda: y.__rmatmul__(x),
    "mm": lambda: x.mm(y),
    "bmm": lambda: torch.bmm(x[None], y[None]),
    "addmm": lambda: torch.addmm(square, x, y),
    "baddbmm": lambda: torch.baddbmm(square, x[None], y[None]),
    "addbmm": lambda: torch.addbmm(square, x[None], y[None]),
    "einsum of 3": lambda: torch.einsum("ij,jk,kl->il", x, y, x),
    "multi_dot": lambda: torch.linalg.multi_dot([x, y, x]),
    "chain_matmul": lambda: torch.chain_matmul(x, y, x),
    "matrix_power": lambda: torch.matrix_power(square, 3),
    "linalg.matrix_power": lambda: torch.linalg.matrix_power(square, 2),
    "vecdot": lambda: torch.linalg.vecdot(x, x),
    "linear": lambda: F.linear(x, x),
    "conv1d": lambda: F.conv1d(x[None], torch.randn(2, 4, 3)),
    "conv2d": lambda: F.conv2d(x[None, None], torch.randn(2, 1, 3, 3)),
    "conv3d": lambda: F.conv3d(x[None, None, None], torch.randn(2, 1, 1, 3, 3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(x[None, None], torch.randn(1, 2, 3, 3)),
    "prelu": lambda: F.prelu(x, torch.ones(1)),
    "attention": lambda: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "no rows": lambda: x[:0] @ y,
    "no columns": lambda: x[:, :0] @ y[:0],
}
LOW_ON_CUDA: dict[str, Callable[[], Any]] = {
    "mv": lambda: x @ x[0],
    "torch.mv": lambda: torch.mv(x, x[0]),
    "addmv": lambda: torch.addmv(x[:, 0], x, x[0]),
    "addr": lambda: torch.addr(y @ x, x[0], x[0]),
}
WIDE: dict[str, Callable[[], Any]] = {
    "x ** 2": lambda: x16**2,
    "2 ** x": lambda: 2**x16,
    "1 / x": lambda: 1 / x16,
    "pow": lambda: torch.pow(x16, 2),
    "exp": lambda: x16.exp(),
    "log": lambda: positive.log(),
    "log1p": lambda: torch.log1p(positive),
    "reciprocal": lambda: x16.reciprocal(),
    "rsqrt": lambda: positive.rsqrt(),
    "tan": lambda: x16.tan(),
    "acos": lambda: positive.acos(),
    "softplus": lambda: F.softplus(x16),
    "softmax": lambda: x16.softmax(-1),
    "F.softmax": lambda: F.softmax(x16, -1),
    "log_softmax": lambda: F.log_softmax(x16, -1),
    "gumbel_softmax": lambda: F.gumbel_softmax(x16),
    "sum": lambda: x16.sum(),
    "prod": lambda: x16.prod(),
    "cumsum": lambda: x16.cumsum(0),
    "norm": lambda: x16.norm(),
    "normalize": lambda: F.normalize(x16),
    "vector_norm": lambda: torch.linalg.vector_norm(x16),
    "matrix_norm": lambda: torch.linalg.matrix_norm(x16),
    "logsumexp": lambda: x16.logsumexp(0),
    "layer_norm": lambda: F.layer_norm(x16, (8,)),
    "rms_norm": lambda: F.rms_norm(x16, (8,)),
    "group_norm": lambda: F.group_norm(x16[None], 2),
    "cdist": lambda: torch.cdist(x16, x16),
    "cosine_similarity": lambda: F.cosine_similarity(x16, x16),
    "bilinear interpolation": lambda: F.interpolate(x16[None, None], size=9, mode="bilinear"),
    "cross_entropy": lambda: F.cross_entropy(x16, labels),
    "nll_loss": lambda: F.nll_loss(x16, labels),
    "mse_loss": lambda: F.mse_loss(x16, x16),
    "l1_loss": lambda: F.l1_loss(x16, x16),
    "huber_loss": lambda: F.huber_loss(x16, x16),
    "kl_div": lambda: F.kl_div(x16, positive, reduction="sum"),
    "with_logits": lambda: F.binary_cross_entropy_with_logits(x16, positive),
    "triplet": lambda: F.triplet_margin_loss(x16, x16, x16),
}
FOLLOWS = {
    "1 - x": lambda: 1 - x16,
    "x + x": lambda: x16 + x16,
    "sqrt": lambda: positive.sqrt(),
    "relu": lambda: x16.relu(),
    "gelu": lambda: F.gelu(x16),
    "mean": lambda: x16.mean(),
    "batch_norm": lambda: F.batch_norm(x16, None, None, training=True),
    "masked_fill": lambda: x16.masked_fill(x16 > 0, -1e9),
    "sum to a type": lambda: x16.sum(dtype=BF16),
    "softmax to a type": lambda: F.softmax(x16, -1, dtype=BF16),
    "dot of one type": lambda: torch.dot(x16[0], x16[0]),
    "tensordot of one type": lambda: torch.tensordot(x16, y.bfloat16(), 1),
    "in place": lambda: x16.clone().exp_(),
}
WIDEST = {
    "x + y": lambda: x16 + x,
    "cat": lambda: torch.cat([x16, x]),
    "stack": lambda: torch.stack([x, x16]),
    "addcmul": lambda: torch.addcmul(x, x16, x16),
    "addcdiv": lambda: torch.addcdiv(x, x16, positive),
    "atan2": lambda: torch.atan2(x16, x),
    "dot": lambda: torch.dot(x[0], x16[0]),
    "tensordot": lambda: torch.tensordot(x, y.bfloat16(), 1),
    "inner": lambda: torch.inner(x, x16),
    "cross": lambda: torch.linalg.cross(x[:, :3], x16[:, :3]),
    "bilinear": lambda: F.bilinear(x, x16, torch.randn(3, 8, 8)),
    "scatter_add": lambda: torch.zeros(4, 8).scatter_add(0, torch.zeros(4, 8).long(), x16),
    "index_put": lambda: torch.zeros(4, 8).index_put((torch.tensor([0]),), x16[0]),
    "grid_sample": lambda: F.grid_sample(
        x16[None, None], torch.zeros(1, 2, 2, 2), align_corners=False
    ),
}
EXPECTED = {
    **{name: (call, BF16) for name, call in (LOW | LOW_ON_CUDA | FOLLOWS).items()},
    **{name: (call, FP32) for name, call in (WIDE | WIDEST).items()},
}


def types(out: Any) -> Any:
    if isinstance(out, tuple | list):
        return tuple(types(item) for item in out)
    return out.dtype if isinstance(out, Tensor) else None


@pytest.mark.parametrize("name", EXPECTED)
def test_type_of_the_result_on_every_device_is_that_on_cuda(name: str) -> None:
    call, dtype = EXPECTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # chain_matmul is deprecated
        with Region(BF16):
            assert call().dtype == dtype


@pytest.mark.parametrize("name", LOW)
def test_a_region_of_float16_gives_float16(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with Region(FP16):
            assert LOW[name]().dtype == FP16


REFUSED_BY_TORCH_CPU = {
    "dot", "tensordot", "inner", "cross", "bilinear", "scatter_add", "index_put",
}  # fmt: skip
WITH_TORCH_CPU = [name for name in EXPECTED if name not in REFUSED_BY_TORCH_CPU]


@pytest.mark.parametrize("name", WITH_TORCH_CPU)
def test_type_under_torch_cpu_is_that_of_torchs_own_region(name: str) -> None:
    call = EXPECTED[name][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with torch.autocast("cpu", BF16):
            want = call().dtype
        with Region(BF16, "torch_cpu"):
            assert call().dtype == want


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.fft.rfft(x16),
        lambda: torch.fft.fft(x16.half()),
        lambda: torch.stft(x16.flatten(), 8, window=torch.ones(8), return_complex=True),
        lambda: torch.fft.ihfftn(x16),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_transforms_of_16_bits_run_in_fp32(policy: str, call: Callable[[], Tensor]) -> None:
    with Region(BF16, policy):
        assert call().dtype == torch.complex64


@pytest.mark.parametrize("policy", POLICIES)
def test_sparse_products_run_in_fp32_forward_and_backward(policy: str) -> None:
    sparse = torch.eye(4).to_sparse().requires_grad_()
    dense = torch.randn(4, 8, requires_grad=True)
    with Region(BF16, policy):
        out = torch.sparse.mm(sparse, dense)
    out.sum().backward()
    assert out.dtype == FP32
    assert torch.equal(dense.grad, torch.ones(4, 8))


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: x.double() @ y.double(), FP64),
        (lambda: x16.sum(dtype=FP64), FP64),
        (lambda: F.softmax(x16, -1, dtype=FP64), FP64),
        (lambda: x.cfloat() @ y.cfloat(), torch.complex64),
        (lambda: integers @ integers, torch.int32),
        (lambda: torch.mm(x, y, out=torch.empty(4, 4)), FP32),
        (lambda: torch.zeros(4, 4).addmm_(x, y), FP32),
    ],
    ids=["float64", "sum", "softmax", "complex", "integers", "out", "in place"],
)  # fmt: skip
def test_what_is_left_alone(call: Callable[[], Tensor], dtype: torch.dtype) -> None:
    with Region(BF16):
        assert call().dtype == dtype


def test_overflow_prone_operations_of_float16_run_in_fp32() -> None:
    with Region(FP16):
        assert torch.ones(70000, dtype=FP16).sum() == 70000
        assert torch.tensor(300.0, dtype=FP16) ** 2 == 90000
        norm = torch.full((1000,), 3000.0, dtype=FP16).norm()
    assert norm.item() == pytest.approx(3000 * 1000**0.5, rel=1e-6)


def test_softmax_of_the_lowest_float16_and_a_lower_score_is_finite() -> None:
    scores = torch.tensor([[-20.0, 1.0]], dtype=FP16)
    mask = torch.tensor([[torch.finfo(FP16).min, 0.0]], dtype=FP16)
    with Region(FP16):
        out = F.softmax(scores + mask, -1)
    assert torch.equal(out, torch.tensor([[0.0, 1.0]]))


def test_binary_cross_entropy_of_probabilities_is_refused_on_cuda_only() -> None:
    probabilities = torch.full((3,), 0.5)
    message = "binary_cross_entropy: got a call in a region of 16 bits; .*_with_logits"
    with Region(BF16), pytest.raises(ValueError, match=message):
        F.binary_cross_entropy(probabilities, probabilities)
    with Region(BF16, "torch_cpu"):
        assert F.binary_cross_entropy(probabilities, probabilities).dtype == FP32


def test_functions_in_python_ask_for_each_of_their_steps() -> None:
    seen: list[str] = []
    with Region(BF16, record=lambda operation: seen.append(operation.name)):
        F.triplet_margin_loss(x, x, x)
        torch.einsum("ij,jk->ik", x, y)
        nn.MultiheadAttention(8, 2)(x[:, None], x[:, None], x[:, None], need_weights=False)
    assert {"triplet_margin_loss", "einsum", "linear", "scaled_dot_product_attention"} <= set(seen)


def test_record_tells_types_and_rule() -> None:
    seen: list[Operation] = []
    with Region(BF16, record=seen.append):
        out = x @ y
        F.softmax(out, -1)
        out.relu()
    product, softmax, relu = (op for op in seen if op.name in ("matmul", "softmax", "relu"))
    assert product == Operation(
        name="matmul", inputs=(FP32, FP32), compute=(BF16,), outputs=(BF16,), rule="16-bit"
    )
    assert (softmax.compute, softmax.rule) == ((FP32,), "fp32 result")
    assert (relu.inputs, relu.outputs, relu.rule) == ((BF16,), (BF16,), "follows its inputs")


def test_region_is_found_only_while_it_runs() -> None:
    assert innermost_region() is None
    with Region(BF16) as outer:
        assert active_dtype(x) is BF16
        with Region(None) as inner:
            assert innermost_region() is inner
            assert active_dtype(x) is None
        assert innermost_region() is outer
    assert active_dtype(x) is None
