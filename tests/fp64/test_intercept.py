"""``emulate``: which products of unchanged code it takes, what it counts, and what it leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mixprec import fp64
from mixprec.fp64 import emulate

DOUBLE, COMPLEX = torch.float64, torch.complex128
# natively 1e400 - 1e400 is inf - inf: only an emulated product is finite, and then exactly 0
ROW = torch.tensor([[1e200, -1e200]], dtype=DOUBLE)
COLUMN = torch.tensor([[1e200], [1e200]], dtype=DOUBLE)
ONE = torch.ones(1, 1, dtype=DOUBLE)


def counts(tally: fp64.Tally) -> dict[str, tuple[int, int]]:
    return {name: (row.emulated, row.native) for name, row in tally.operations.items()}


def is_native(product: Tensor) -> bool:
    return not bool(torch.isfinite(product).any())


def random(*shape: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


PRODUCTS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "mm": ("mm", lambda a, b, c: torch.mm(a, b)),
    "operator": ("mm", lambda a, b, c: a @ b),
    "matmul": (
        "bmm",
        lambda a, b, c: torch.matmul(a[None, None].expand(2, 1, -1, -1), b.expand(2, 2, 2, 1)),
    ),
    "addmm": ("addmm", lambda a, b, c: torch.addmm(c, a, b)),
    "bmm": ("bmm", lambda a, b, c: torch.bmm(a[None], b[None])),
    "baddbmm": ("baddbmm", lambda a, b, c: torch.baddbmm(c, a[None], b[None])),
    "addbmm": ("addbmm", lambda a, b, c: torch.addbmm(c, a[None], b[None])),
    "mv": ("mv", lambda a, b, c: torch.mv(a, b[:, 0])),
    "addmv": ("addmv", lambda a, b, c: torch.addmv(c[0], a, b[:, 0])),
    "dot": ("dot", lambda a, b, c: torch.dot(a[0], b[:, 0])),
    "vdot": ("vdot", lambda a, b, c: torch.vdot(a[0], b[:, 0])),
    "inner": ("dot", lambda a, b, c: torch.inner(a, b.mT)),
    "linear": ("addmm", lambda a, b, c: functional.linear(a, b.mT, c[0])),
    "einsum": ("bmm", lambda a, b, c: torch.einsum("ik,kj->ij", a, b)),
    "tensordot": ("dot", lambda a, b, c: torch.tensordot(a, b, dims=1)),
    "multi_dot": ("mm", lambda a, b, c: torch.linalg.multi_dot([a, b])),
    "conv1d": (
        "convolution",
        lambda a, b, c: functional.conv1d(a[None], b.mT[None]),
    ),
    "conv_transpose1d": (
        "convolution",
        lambda a, b, c: functional.conv_transpose1d(a.mT[None], b[..., None]),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [DOUBLE, COMPLEX], ids=["real", "complex"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_every_way_to_multiply_is_emulated(
    name: str, dtype: torch.dtype, mode: Callable[[], Any]
) -> None:
    operation, multiply = PRODUCTS[name]
    a, b, c = (x.to(dtype) for x in (ROW, COLUMN, torch.zeros(1, 1)))
    assert is_native(multiply(a, b, c))
    with mode(), emulate() as done:
        result = multiply(a, b, c)
    assert torch.equal(result, torch.zeros_like(result))
    assert counts(done).keys() == {operation}
    assert done.native == 0


def test_backward_inside_is_emulated_and_outside_is_native() -> None:
    a, b = ROW.clone().requires_grad_(), COLUMN.clone().requires_grad_()
    # the gradient of the first factor, 1e200 - 1e200 summed over two equal columns
    with emulate() as done:
        (a @ b.expand(2, 2)).backward(torch.tensor([[1e200, -1e200]], dtype=DOUBLE))
    assert counts(done) == {"mm": (3, 0)}
    assert a.grad is not None
    assert torch.equal(a.grad, torch.zeros_like(a))
    a.grad = None
    with emulate() as done:
        out = a @ b.expand(2, 2)
    out.backward(torch.tensor([[1e200, -1e200]], dtype=DOUBLE))
    assert counts(done) == {"mm": (1, 0)}
    assert is_native(a.grad)


@pytest.mark.parametrize("dtype", [DOUBLE, COMPLEX], ids=["real", "complex"])
def test_gradients_are_those_of_the_function(dtype: torch.dtype) -> None:
    operands = [random(*shape, dtype=dtype).requires_grad_() for shape in ((2, 3), (3, 2), (2,))]

    def layer(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.addmm(c, a, b, alpha=1.5, beta=0.5) @ torch.einsum("ij,jk->ik", a, b)

    with emulate() as done:
        assert torch.autograd.gradcheck(layer, operands, fast_mode=dtype.is_complex)
        assert torch.autograd.gradgradcheck(layer, operands, fast_mode=True)
    assert done.native == 0


def test_a_model_trains_with_all_its_products_emulated() -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 4)
    ).double()
    recurrent = nn.LSTM(4, 3, batch_first=True).double()
    x = random(5, 1, 8)

    def gradients() -> list[Tensor]:
        parameters = [*model.parameters(), *recurrent.parameters()]
        loss = recurrent(model(x)[:, None])[0].square().sum()
        return list(torch.autograd.grad(loss, parameters))

    native = gradients()
    with emulate() as done:
        found = gradients()
    torch.testing.assert_close(found, native, rtol=1e-12, atol=1e-14)
    assert done.native == 0
    assert {"convolution", "convolution_backward", "addmm", "mm"} <= done.operations.keys()
    assert not all(torch.equal(x, y) for x, y in zip(found, native, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_other_types_pass_through_to_the_bit(dtype: torch.dtype) -> None:
    a, b = (random(9, 9).mul(8).to(dtype) for _ in "ab")
    native = a @ b
    with emulate() as done:
        assert torch.equal(a @ b, native)
    name = str(dtype).removeprefix("torch.")
    assert done.operations["mm"].reasons == {name: 1}


def test_mixed_types_and_wrong_shapes_are_torch_s_errors() -> None:
    with emulate() as done:
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(random(2, 2), random(2, 2).float())
        with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied"):
            torch.mm(random(2, 3), random(2, 3))
        with pytest.raises(RuntimeError, match="Expected"):
            torch.mm(random(2, 3), random(3, 2), out=torch.empty(2, 2))
    assert done.emulated == 0


def test_in_place_and_out_write_where_they_should() -> None:
    a, b = random(3, 4), random(4, 5)
    with emulate() as done:
        out, into, columns = torch.empty(3, 5, dtype=DOUBLE), random(3, 5), random(5, 3).mT
        expected = [a @ b, torch.addmm(into, a, b, beta=2, alpha=3)]
        again = torch.mm(a, b, out=out)
        same = into.addmm_(a, b, beta=2, alpha=3)
        assert torch.mm(a, b, out=columns) is columns
        empty = torch.mm(a, b, out=torch.empty(0, dtype=DOUBLE))
    assert again is out
    assert same is into
    assert torch.equal(out, expected[0])
    assert torch.equal(columns, expected[0])
    assert columns.stride() == (1, 3)
    assert torch.equal(empty, expected[0])
    assert torch.equal(into, expected[1])
    assert counts(done) == {"mm": (4, 0), "addmm": (2, 0)}


def test_out_may_be_an_operand_and_of_another_shape_warns() -> None:
    a, b = random(3, 3), random(3, 3)
    with emulate():
        expected = a @ b
        with pytest.warns(UserWarning, match="was resized"):
            assert torch.equal(torch.mm(a, b, out=random(2, 2)), expected)
        bias = torch.zeros(3, dtype=DOUBLE)
        assert torch.equal(torch.addmm(bias, a, b, out=a), expected)


def test_beta_0_does_not_read_the_added_tensor_and_alpha_0_not_the_factors() -> None:
    nan = torch.full((1, 1), torch.nan, dtype=DOUBLE)
    with emulate() as done:
        assert torch.addmm(nan, ONE, ONE, beta=0).item() == 1
        assert nan.clone().addmm_(ONE, ONE, beta=0).item() == 1
        assert torch.baddbmm(nan, ONE[None], ONE[None], beta=0, alpha=2).item() == 2
        assert torch.addmv(nan[0], ONE, ONE[0], beta=0).item() == 1
        assert torch.addmm(ONE, nan, ONE, alpha=0).item() == 1
        assert torch.isnan(torch.addmm(nan, ONE, ONE)).item()
    assert done.native == 0


@pytest.mark.parametrize("shapes", [((2, 0), (0, 3)), ((0, 2), (2, 3)), ((2, 3), (3, 0))])
def test_empty_products_are_torch_s_own(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    a, b = (random(*shape) for shape in shapes)
    ones = torch.ones(a.shape[0], b.shape[1], dtype=DOUBLE)
    native = a @ b, torch.addmm(ones, a, b, beta=2)
    with emulate() as done:
        found = a @ b, torch.addmm(ones, a, b, beta=2)
    assert all(torch.equal(x, y) for x, y in zip(found, native, strict=True))
    assert counts(done) == {"mm": (0, 1), "addmm": (0, 1)}
    assert done.operations["mm"].reasons == {"nothing to multiply": 1}


def test_views_of_every_kind_are_as_their_copies() -> None:
    square = torch.complex(random(6, 6), random(6, 6))
    negated = square.conj().imag
    assert negated.is_neg()
    row = random(1, 6).expand(6, 6)
    with emulate() as done:
        for x, y in ((square, square.mH), (negated, square.real[::2].mT), (row, row.mT)):
            assert torch.equal(x @ y, x.resolve_neg().clone() @ y.resolve_conj().contiguous())
    assert done.native == 0


def test_a_bias_that_is_expanded_broadcasts() -> None:
    a, b = random(3, 4), random(4, 5)
    with emulate():
        for shape in ((5,), (1, 5), (3, 1), (1,)):
            bias = random(*shape)
            assert torch.equal(torch.addmm(bias, a, b), a @ b + bias)


def test_small_products_stay_native() -> None:
    with emulate(min_size=3) as done:
        assert is_native(ROW @ COLUMN)
        random(3, 3) @ random(3, 3)
        random(9, 2) @ random(2, 9)
    assert counts(done) == {"mm": (1, 2)}
    assert done.operations["mm"].reasons == {"smaller than 3": 2}


def test_operations_that_are_not_asked_for_stay_native() -> None:
    with emulate(ops=["bmm"]) as done:
        assert is_native(ROW @ COLUMN)
        torch.bmm(ROW[None], COLUMN[None])
    assert counts(done) == {"mm": (0, 1), "bmm": (1, 0)}
    assert done.operations["mm"].reasons == {"not in ops": 1}


def test_products_inside_other_kernels_are_named() -> None:
    a = random(4, 4)
    heads = [random(1, 2, 3, 4) for _ in "qkv"]
    with emulate() as done:
        torch.linalg.solve(a, a)
        functional.scaled_dot_product_attention(*heads)
        torch.cdist(a, a)
        a.to_sparse() @ a
        torch.linalg.norm(a)
    reasons = {name: next(iter(row.reasons)) for name, row in done.operations.items()}
    assert reasons.keys() == {
        "_linalg_solve_ex",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_cdist_forward",
        "mm",
    }
    assert "mixprec.fp64 has solve" in reasons["_linalg_solve_ex"]
    assert "SDPBackend.MATH" in reasons["_scaled_dot_product_flash_attention_for_cpu"]
    assert "spmm" in reasons["mm"]
    assert done.emulated == 0


def test_attention_by_products_is_emulated() -> None:
    heads = [random(1, 2, 3, 4) for _ in "qkv"]
    native = functional.scaled_dot_product_attention(*heads)
    math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math_only, emulate() as done:
        found = functional.scaled_dot_product_attention(*heads)
    torch.testing.assert_close(found, native, rtol=1e-13, atol=1e-14)
    assert counts(done) == {"bmm": (2, 0)}


def test_nested_contexts_the_inner_one_decides() -> None:
    with emulate() as outer:
        with emulate(min_size=3) as inner:
            assert is_native(ROW @ COLUMN)
            random(4, 4) @ random(4, 4)
        assert (ROW @ COLUMN).item() == 0
    assert counts(inner) == {"mm": (1, 1)}
    assert counts(outer) == {"mm": (1, 0)}


def test_our_own_products_inside_are_not_emulated_again() -> None:
    with fp64.record() as alone:
        fp64.matmul(random(4, 4), random(4, 4))
    with emulate() as done, fp64.record() as inside:
        fp64.matmul(random(4, 4), random(4, 4))
    assert len(alone) == len(inside) == 1
    assert counts(done) == {}


def test_an_exception_leaves_nothing_switched_on() -> None:
    with pytest.raises(ZeroDivisionError), emulate() as done:
        raise ZeroDivisionError
    assert is_native(ROW @ COLUMN)
    assert counts(done) == {}


def test_another_thread_multiplies_natively() -> None:
    found: list[Tensor] = []
    with emulate() as done:
        thread = threading.Thread(target=lambda: found.append(ROW @ COLUMN))
        thread.start()
        thread.join()
        assert (ROW @ COLUMN).item() == 0
    assert is_native(found[0])
    assert counts(done) == {"mm": (1, 0)}


def test_two_threads_each_in_a_context_of_its_own() -> None:
    found: list[tuple[float, int]] = []
    is_open, is_closed = threading.Event(), threading.Event()

    def first() -> None:
        with emulate() as done:
            is_open.set()
            # torch keeps a flag of the process, which contexts that do not nest leave set
            total = sum((ROW @ COLUMN).item() for _ in range(20)) + is_closed.wait(60) - 1
        found.append((total, done.emulated))

    def second() -> None:
        is_open.wait(60)
        with emulate() as done:
            total = sum((ROW @ COLUMN).item() for _ in range(10))
        is_closed.set()
        found.append((total, done.emulated))

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(0.0, 10), (0.0, 20)]
