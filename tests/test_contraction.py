"""Contractions: torch.einsum's equations, each batch entry the linear layer's three products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixprec import RECIPES, GemmSpec, Noise, QuantSpec, Recipe, linear
from mixprec.amp import autocast
from mixprec.contraction import einsum
from mixprec.formats import FORMATS
from mixprec.linear_products import delayed_positions

E4M3 = QuantSpec(format=FORMATS["e4m3"])
ROW = QuantSpec(format=FORMATS["e4m3"], block=(1, -1), scale_rule="pow2")
BY_OPERAND = Recipe(
    output=GemmSpec(a=ROW, b=QuantSpec(format=FORMATS["e2m1"])),
    grad_input=GemmSpec(a=QuantSpec(format=FORMATS["e5m2"]), b=ROW),
    grad_weight=GemmSpec(a=ROW, b=E4M3),
)
NOISY = Recipe(output=GemmSpec(a=replace(E4M3, rounding="stochastic"), b=E4M3))
STATELESS = [recipe for recipe in RECIPES.values() if not delayed_positions(recipe)]
NOISE = Noise(seed=5, step=2, stream=64)

PAIRS = [
    ("ij,jk", (3, 4), (4, 5)),
    ("ij,kj->ik", (3, 4), (5, 4)),
    ("ji,jk->ki", (4, 3), (4, 5)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bhqk,bkhd->bqhd", (2, 3, 4, 5), (2, 5, 3, 4)),
    ("i,i", (7,), (7,)),
    ("i,j->ij", (3,), (4,)),
    ("i,j->ji", (3,), (4,)),
    ("i,i->i", (5,), (5,)),
    (",->", (), ()),
    (",ij", (), (2, 3)),
    ("ij,kl->", (2, 3), (4, 5)),
    ("ij,jk->", (2, 3), (3, 4)),
    ("aij,jkc->ik", (2, 3, 4), (4, 5, 2)),
    ("ii,ij->j", (3, 3), (3, 4)),
    ("iji,jkk->ki", (3, 2, 3), (2, 4, 4)),
    ("iii,i->i", (3, 3, 3), (3,)),
    ("...ij,...jk", (2, 3, 4), (2, 4, 5)),
    ("...ij,...jk", (6, 1, 3, 4), (2, 4, 5)),
    ("...ij,jk->...ik", (2, 2, 3, 4), (4, 5)),
    ("i...,i...->...", (3, 2, 2), (3, 2, 2)),
    ("i...,i->i", (3, 2, 2), (3,)),
    ("bij,bjk->bik", (1, 3, 4), (2, 4, 5)),
    ("ij,jk->ik", (3, 1), (4, 5)),
    (" i j , j k -> i k ", (2, 3), (3, 4)),
    ("aB,Bc", (2, 3), (3, 4)),
    ("Ba,ac", (2, 3), (3, 4)),
    ("ij,jk->ik", (3, 0), (0, 5)),
    ("bij,bjk->bik", (0, 3, 4), (0, 4, 5)),
    ("bij,bjk->bik", (2, 0, 4), (2, 4, 5)),
    ("ij,jk->...ik", (3, 2), (2, 5)),
]


def integers(shape: tuple[int, ...], largest: int = 4) -> Tensor:
    """Whole numbers, few and small enough for every sum of them to be exact."""
    return torch.randint(-largest, largest + 1, shape).float().requires_grad_()


def as_double(x: Tensor) -> Tensor:
    return x.detach().double().requires_grad_()


@pytest.mark.parametrize(("recipe", "largest"), [("fp32", 99), ("tf32", 9), ("fp8_rowwise", 1)])
@pytest.mark.parametrize(("equation", "a_shape", "b_shape"), PAIRS)
def test_einsum_of_two_operands_and_its_gradients_equal_exact_sums(
    equation: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...], recipe: str, largest: int
) -> None:
    # what fp8_rowwise sees after summing single axes stays below 17, where e4m3 has every integer
    a, b = integers(a_shape, largest), integers(b_shape, largest)
    a_double, b_double = as_double(a), as_double(b)
    expected = torch.einsum(equation, a_double, b_double)
    out = einsum(equation, a, b, recipe=recipe)
    assert (out.dtype, out.shape) == (torch.float32, expected.shape)
    assert torch.equal(out.double(), expected)
    g = torch.randint(-4, 5, expected.shape)
    out.backward(g.float())
    expected.backward(g.double())
    assert torch.equal(a.grad.double(), a_double.grad)
    assert torch.equal(b.grad.double(), b_double.grad)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk,kl", [(2, 3), (3, 4), (4, 2)]),
        ("ij,jk,kl->il", [(2, 3), (3, 1), (4, 2)]),
        ("bi,bj,b->ij", [(3, 2), (3, 4), (3,)]),
        ("i,i,i", [(3,), (3,), (3,)]),
        ("...i,...i,j->...j", [(2, 3), (4, 1, 3), (2,)]),
        ("ij,k,jl,m->m", [(2, 3), (2,), (3, 4), (5,)]),
        ("a,b,c,d->dcba", [(2,), (3,), (1,), (2,)]),
    ],
)
def test_more_operands_are_contracted_from_left_to_right(
    equation: str, shapes: list[tuple[int, ...]]
) -> None:
    operands = [integers(shape) for shape in shapes]
    doubles = [as_double(x) for x in operands]
    expected = torch.einsum(equation, *doubles)
    out = einsum(equation, *operands, recipe="fp32")
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(out.double(), expected)
    for x, double in zip(operands, doubles, strict=True):
        assert torch.equal(x.grad.double(), double.grad)


@dataclass(frozen=True)
class Call:
    """An equation with shapes, most of them valid."""

    equation: str
    shapes: list[tuple[int, ...]]

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(-3, 4, shape, generator=generator).float() for shape in self.shapes]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Letters with a size each, sometimes 1 or another; ellipses; results given or not."""
    sizes = {name: draw(st.integers(0, 3)) for name in "abB"}
    shared = draw(st.lists(st.integers(1, 3), max_size=2))
    parts, shapes = [], []
    for _ in range(draw(st.integers(1, 3))):
        names = draw(st.lists(st.sampled_from("abB"), max_size=3))
        shape = [sizes[name] if draw(st.integers(0, 9)) else 1 for name in names]
        if draw(st.booleans()):
            place = draw(st.integers(0, len(names)))
            count = draw(st.integers(0, len(shared)))
            hidden = [size if draw(st.booleans()) else 1 for size in shared[len(shared) - count :]]
            names.insert(place, "...")
            shape[place:place] = hidden
        parts.append("".join(names))
        shapes.append(tuple(shape))
    equation = ",".join(parts)
    if draw(st.booleans()):
        result = draw(st.lists(st.sampled_from(["a", "b", "B", "..."]), max_size=4, unique=True))
        equation += "->" + "".join(result)
    return Call(equation, shapes)


def check_as_torch(call: Call) -> None:
    """Equal to torch.einsum in float64, or refused where it refuses."""
    operands = call.tensors()
    try:
        expected = torch.einsum(call.equation, *(x.double() for x in operands))
    except (RuntimeError, ValueError):
        with pytest.raises(ValueError, match=r"(equation|operands\[\d\]): got "):
            einsum(call.equation, *operands, recipe="fp32")
        return
    out = einsum(call.equation, *operands, recipe="fp32")
    assert out.shape == expected.shape
    assert torch.equal(out.double(), expected)


@given(calls())
@settings(max_examples=300)
def test_any_equation_means_what_torch_says(call: Call) -> None:
    check_as_torch(call)


@given(st.text(alphabet="ij.,-> A1", max_size=9), st.lists(st.integers(0, 3), max_size=2))
@settings(max_examples=400)
def test_any_text_is_taken_or_refused_as_torch_does(equation: str, ndims: list[int]) -> None:
    check_as_torch(Call(equation, [(2,) * ndim for ndim in ndims]))


@pytest.mark.parametrize(
    ("equation", "shapes", "message"),
    [
        ("ij,jk", [(2, 3)], "equation: got 'ij,jk' for 1 operands; it names 2"),
        ("ij", [(2, 3), (3, 4)], "equation: got 'ij' for 2 operands; it names 1"),
        ("ij,j1", [(2, 3), (3, 4)], "equation: got 'ij,j1'; must be letters"),
        ("......ij,jk", [(2, 3), (3, 4)], "change '......ij'"),
        ("ij,jk->ijj", [(2, 3), (3, 4)], "at most once; change 'ijj'"),
        ("ij,jk->il", [(2, 3), (3, 4)], "at most once; change 'il'"),
        ("i,jk", [(2, 3), (3, 4)], r"operands\[0\] has 2 axes; name each"),
        ("ij,ijk...", [(2, 3), (3, 4)], r"operands\[1\] has 2 axes; name each"),
        ("ij,jk", [(2, 3), (4, 5)], r"\(4, 5\); index 'j' has size 3 before and 4 here"),
        ("ii,ij", [(1, 3), (3, 5)], r"\(1, 3\); index 'i' has size 1 before and 3 here"),
        ("...i,...i", [(2, 3), (4, 3)], "index '...1' has size 2 before and 4 here"),
    ],
)
def test_refusals_say_what_is_wrong(
    equation: str, shapes: list[tuple[int, ...]], message: str
) -> None:
    operands = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        einsum(equation, *operands, recipe="fp32")


def test_wrong_types_are_refused() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(TypeError, match="equation: got Tensor; must be a string"):
        einsum(x, [0, 1], x, [1, 2], recipe="fp32")
    with pytest.raises(TypeError, match=r"operands\[1\]: got list; must be a float"):
        einsum("ij,jk", x, [[1.0]], recipe="fp32")
    with pytest.raises(TypeError, match=r"operands\[0\]: got torch.int64; must be a float"):
        einsum("ij,jk", torch.zeros(2, 2, dtype=torch.int64), x, recipe="fp32")
    with pytest.raises(ValueError, match="impl: got 'fastest'"):
        einsum("ij,jk", x, x, recipe="fp8_rowwise", impl="fastest")
    with pytest.raises(ValueError, match="recipe: "):
        einsum("ij,jk", x, x, recipe="fp8_rowise")
    with pytest.raises(ValueError, match=r"state: got None; .* a recipe without a history"):
        einsum("ij,jk", x, x, recipe="fp8_delayed")
    with pytest.raises(ValueError, match="noise: got None"):
        einsum("ij,jk", x, x, recipe=NOISY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", [*STATELESS, BY_OPERAND], ids=str)
def test_each_batch_entry_is_a_linear_call_of_its_own(recipe: Recipe, dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 5, 8, dtype=dtype), torch.randn(2, 6, 8, dtype=dtype)
    a[1] *= 64  # entries do not share a scale
    g = torch.randn(2, 5, 6, dtype=dtype)
    x, w = a.clone().requires_grad_(), b.mT.clone().requires_grad_()
    out = einsum("bik,bkj->bij", x, w, recipe=recipe, noise=NOISE)
    out.backward(g)
    for i in range(2):
        x_i, w_i = a[i].clone().requires_grad_(), b[i].clone().requires_grad_()
        noise = replace(NOISE, stream=64 + 8 * i)
        out_i = linear(x_i, w_i, recipe=recipe, noise=noise)
        out_i.backward(g[i])
        assert torch.equal(out[i], out_i)
        assert torch.equal(x.grad[i], x_i.grad)
        assert torch.equal(w.grad[i], w_i.grad.t())


def test_axis_that_broadcasts_is_free_in_the_other_operand() -> None:
    a, b = torch.randn(1, 5, 8), torch.randn(2, 6, 8)
    out = einsum("bik,bjk->bij", a, b, recipe="fp8_tensorwise")
    whole = linear(a[0], b.reshape(12, 8), recipe="fp8_tensorwise")
    assert torch.equal(out, whole.reshape(5, 2, 6).transpose(0, 1))


def test_batch_entry_draws_from_streams_of_its_own() -> None:
    a, b = torch.randn(4, 3, 8), torch.randn(4, 5, 8)
    out = einsum("bik,bjk->bij", a, b, recipe=NOISY, noise=NOISE)
    for i in range(4):
        noise = replace(NOISE, stream=64 + 8 * i)
        assert torch.equal(out[i], linear(a[i], b[i], recipe=NOISY, noise=noise))
    same = einsum("bik,bjk->bij", a[:1].repeat(4, 1, 1), b, recipe=NOISY, noise=NOISE)
    assert torch.equal(same[0], out[0])


def test_later_products_draw_from_later_streams() -> None:
    a, b, c = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(5, 4)
    out = einsum("bik,bjk,jl->bil", a, b, c, recipe=NOISY, noise=NOISE)
    first = einsum("bik,bjk->bij", a, b, recipe=NOISY, noise=NOISE)
    noise = replace(NOISE, stream=64 + 8 * 2)
    last = linear(first.reshape(6, 5), c.t(), recipe=NOISY, noise=noise)
    assert torch.equal(out, last.reshape(2, 3, 4))


def test_one_operand_is_torchs_own() -> None:
    x = torch.randn(3, 3).requires_grad_()
    assert torch.equal(einsum("ii->i", x, recipe="fp8_rowwise"), x.diagonal())
    assert torch.equal(einsum("ij->ji", [x], recipe="fp8_rowwise"), x.t())
    einsum("ii", x, recipe="fp8_rowwise").backward()
    assert torch.equal(x.grad, torch.eye(3))


def test_axes_of_one_operand_are_summed_wide() -> None:
    ones = torch.ones(300, 2, dtype=torch.bfloat16)
    out = einsum("ij,jk->jk", ones, torch.ones(2, 3, dtype=torch.bfloat16), recipe="fp8_tensorwise")
    assert out.dtype == torch.bfloat16
    assert out.unique().tolist() == [300.0]
    big = torch.full((256, 1), 300.0, dtype=torch.float16)
    scaled = einsum("ij,k->k", big, torch.full((1,), 2.0**-7).half(), recipe="fp32")
    assert scaled.tolist() == [256 * 300 / 128]


@pytest.mark.parametrize(
    ("types", "result"),
    [
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float32, torch.float16), torch.float32),
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
        ((torch.float16, torch.float16), torch.float16),
    ],
)
def test_result_has_the_widest_type_and_gradients_their_operands(
    types: tuple[torch.dtype, torch.dtype], result: torch.dtype
) -> None:
    a, b = (torch.ones(2, 2, dtype=dtype, requires_grad=True) for dtype in types)
    out = einsum("ij,jk", a, b, recipe="fp8_rowwise")
    out.sum().backward()
    assert out.dtype == result
    assert (a.grad.dtype, b.grad.dtype) == types


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3, 4)], ids=str)
@pytest.mark.parametrize(
    "region", [partial(torch.autocast, "cpu", torch.bfloat16), partial(autocast, "bf16")]
)
def test_result_has_the_type_of_a_region(region: Callable[[], Any], shape: tuple[int, ...]) -> None:
    a, b = torch.randn(shape), torch.randn(shape)
    with region():
        out = einsum("bik,bjk->bij", a, b, recipe="fp8_tensorwise")
        summed = einsum("bik,bjk->ij", a, b.sum(0, keepdim=True), recipe="fp8_tensorwise")
        double = einsum("bik,bjk->bij", a.double(), b, recipe="fp8_tensorwise")
    assert (out.dtype, double.dtype) == (torch.bfloat16, torch.float64)
    assert summed.dtype == torch.bfloat16
    if shape[0]:
        expected = einsum("bik,bjk->bij", a.bfloat16(), b, recipe="fp8_tensorwise").bfloat16()
        assert torch.equal(out, expected)


def test_gradient_nobody_needs_is_not_made() -> None:
    a, b = integers((2, 3, 4)), integers((2, 5, 4)).detach()
    einsum("bik,bjk->bij", a, b, recipe="fp8_rowwise").sum().backward()
    assert a.grad is not None
    assert b.grad is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_einsum_compiles_into_one_graph() -> None:
    a, b = torch.randn(2, 3, 8), torch.randn(2, 5, 8)

    def contract(a: Tensor, b: Tensor) -> Tensor:
        return einsum("bik,bjk->bij", a, b, recipe="fp8_rowwise")

    compiled = torch.compile(contract, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), contract(a, b))
