"""Models compiled whole: one graph for a shape, forward and backward, with the numbers of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixprec
from mixprec import loops, scaling
from mixprec.amp.setup import cast_parameters, region
from mixprec.recipes import RECIPES, Recipe, with_base

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]
WIDTH = 32


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).view(*x.shape[:2], 3, 2, WIDTH // 2)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Convolved(nn.Sequential):
    """Convolutions, which Inductor calls by their Python name."""

    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(32, WIDTH),
        )  # fmt: skip


class Sigmoids(nn.Sequential):
    def __init__(self, depth: int = 5) -> None:
        super().__init__(*(part for _ in range(depth) for part in self.layer()))

    @staticmethod
    def layer() -> tuple[nn.Module, ...]:
        return nn.Linear(WIDTH, WIDTH), nn.Sigmoid()


class Run(NamedTuple):
    losses: list[float]
    first: list[Tensor]
    graphs: int


def train(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    recipe: Recipe,
    backend: str | None,
    batches: tuple[int, ...] = (8, 8, 8, 8, 5),
) -> Run:
    """Losses, the first step's output and gradients, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = make()
    if recipe.output != RECIPES["fp32"].output:
        mixprec.convert(model, recipe)
    cast_parameters(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mixprec.attach(model, optimizer)
    run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    dtype = next(model.parameters()).dtype
    losses: list[float] = []
    first: list[Tensor] = []
    for rows in batches:
        x = torch.randn(rows, *shape).to(dtype)
        with region(recipe):
            out = run(x)
            loss = (out.float() - x.float().flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        first = first or [out.detach(), *(grad.clone() for grad in grads if grad is not None)]
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, first, torch._dynamo.utils.counters["stats"]["unique_graphs"])


def assert_alike(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    recipe: Recipe,
    backend: str,
    *,
    is_exact: bool = True,
    batches: tuple[int, ...] = (8, 8, 8, 8, 5),
) -> None:
    """One graph for each size of batch; the bits of eager code, or its losses."""
    want, got = (train(make, shape, recipe, each, batches) for each in (None, backend))
    assert got.graphs == len(set(batches))
    assert got.losses == pytest.approx(want.losses, rel=1e-5 if is_exact else 5e-3)
    if is_exact:
        assert len(got.first) == len(want.first)
        assert all(torch.equal(a, b) for a, b in zip(got.first, want.first, strict=True))


# one scale a tensor: eager code multiplies with it inside the product, compiled code afterwards
OTHER_SUMS = {"fp8_tensorwise", "fp8_delayed", "nvfp4"}


@pytest.mark.parametrize("base", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_block_in_a_region_has_the_bits_of_eager_code(base: str, backend: str) -> None:
    recipe = with_base(RECIPES["fp32"], base)  # type: ignore[arg-type]
    assert_alike(Block, (6, WIDTH), recipe, backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_convolutions_in_a_region_have_the_bits_of_eager_code(backend: str) -> None:
    assert_alike(Convolved, (WIDTH,), with_base(RECIPES["fp32"], "bf16"), backend, batches=(8, 5))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_converted_layer_in_a_region_has_the_bits_of_eager_code(backend: str) -> None:
    recipe = with_base(RECIPES["fp8_rowwise"], "bf16")
    assert_alike(lambda: Sigmoids(1), (WIDTH,), recipe, backend, batches=(8, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_compiles_once_for_a_shape(name: str) -> None:
    is_exact = name not in OTHER_SUMS
    # tracing a layer takes seconds a size, which has nothing to do with most recipes
    batches = (8, 8, 8, 8, 5) if name in ("bf16", "fp8_delayed") else (8, 8)
    assert_alike(
        lambda: Sigmoids(1),
        (WIDTH,),
        RECIPES[name],
        "aot_eager",
        is_exact=is_exact,
        batches=batches,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_delayed"])
def test_five_layers_in_a_row_are_one_graph(name: str) -> None:
    assert_alike(Sigmoids, (WIDTH,), RECIPES[name], "eager", is_exact=False, batches=(8, 8))


@pytest.mark.slow
@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_inductor_keeps_the_rounding_of_a_region(base: str) -> None:
    # batches of one size: C++ is compiled anew for each
    recipe = with_base(RECIPES["fp32"], base)  # type: ignore[arg-type]
    assert_alike(Convolved, (WIDTH,), recipe, "inductor", batches=(8, 8))


@pytest.mark.slow
def test_inductor_compiles_a_converted_layer_in_a_region() -> None:
    recipe = with_base(RECIPES["fp8_rowwise"], "bf16")
    assert_alike(lambda: Sigmoids(1), (WIDTH,), recipe, "inductor", is_exact=False, batches=(8, 8))


def test_one_graph_serves_every_number_of_rows() -> None:
    graphs = []

    def counted(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = nn.Sequential(nn.Linear(128, 128))
    mixprec.convert(model, "fp8_rowwise")
    compiled = torch.compile(model, backend=counted, dynamic=True)
    for rows in (64, 2 * loops.SMALLEST // 128, scaling._LARGE // 64):
        compiled(torch.randn(rows, 128))
    assert len(graphs) == 1
