"""torch.func over converted layers: gradients, maps over samples, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import mixprec

DYNAMIC = [
    name
    for name, recipe in mixprec.RECIPES.items()
    if recipe.base == "fp32"
    and not recipe.is_high_precision
    and not any(spec is not None and spec.is_stochastic for spec in recipe.specs)
]
Parameters = dict[str, Tensor]


def converted(recipe: str) -> tuple[nn.Module, Parameters]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    mixprec.convert(model, recipe)
    return model, {name: p.detach() for name, p in model.named_parameters()}


def loss_of(model: nn.Module) -> Callable[[Parameters, Tensor, Tensor], Tensor]:
    def loss(parameters: Parameters, x: Tensor, targets: Tensor) -> Tensor:
        out = functional_call(model, parameters, (x,))
        return nn.functional.cross_entropy(out, targets, reduction="sum")

    return loss


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_grad_is_backwards_gradient(recipe: str) -> None:
    model, parameters = converted(recipe)
    x, targets = torch.randn(6, 32), torch.randint(4, (6,))
    found = grad(loss_of(model))(parameters, x, targets)
    loss_of(model)(dict(model.named_parameters()), x, targets).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.grad)


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_vmap_gives_each_sample_its_own_gradient(recipe: str) -> None:
    model, parameters = converted(recipe)
    x, targets = torch.randn(3, 32), torch.randint(4, (3,))
    loss = loss_of(model)
    single = grad(lambda p, row, target: loss(p, row[None], target[None]))
    found = vmap(single, in_dims=(None, 0, 0))(parameters, x, targets)
    for i in range(len(x)):
        alone = grad(loss)(parameters, x[i : i + 1], targets[i : i + 1])
        for name, value in alone.items():
            assert torch.equal(found[name][i], value)


def test_gradients_of_samples_sum_to_the_batch_s() -> None:
    model, parameters = converted("fp8_rowwise_hp_grad_weight")
    x, targets = torch.randn(6, 32), torch.randint(4, (6,))
    loss = loss_of(model)
    single = grad(lambda p, row, target: loss(p, row[None], target[None]))
    found = vmap(single, in_dims=(None, 0, 0))(parameters, x, targets)
    whole = grad(loss)(parameters, x, targets)
    for name, value in whole.items():
        assert torch.allclose(found[name].sum(0), value, rtol=1e-5, atol=1e-6)


def test_vmap_of_forward_and_jacrev_are_the_rows_alone() -> None:
    model, parameters = converted("fp8_rowwise")
    x = torch.randn(5, 1, 32)
    run = lambda row: functional_call(model, parameters, (row,))  # noqa: E731
    assert torch.equal(vmap(run)(x), torch.stack([model(row) for row in x]))
    jacobian = jacrev(run)(x[0, 0])
    row = x[0, 0].clone().requires_grad_()
    for i in range(4):
        (expected,) = torch.autograd.grad(model(row)[i], row)
        assert torch.equal(jacobian[i], expected)


def test_vmap_leaves_histories_as_samples_one_by_one() -> None:
    mapped, parameters = converted("fp8_delayed")
    alone, _ = converted("fp8_delayed")
    x = torch.randn(4, 1, 32)
    vmap(lambda row: functional_call(mapped, parameters, (row,)))(x)
    for row in x:
        alone(row)
    for name, value in mixprec.state_dict(alone).items():
        assert torch.equal(mixprec.state_dict(mapped)[name], value)


# Dynamo takes no function that says more; decompositions, loaded for it, warn of torch.jit
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_is_refused() -> None:
    model, parameters = converted("fp8_rowwise")
    x = torch.randn(2, 32)
    with pytest.raises(NotImplementedError, match="forward mode AD"):
        jvp(lambda x: functional_call(model, parameters, (x,)), (x,), (x,))


def test_gradient_penalty_is_refused_in_both_ways() -> None:
    model, parameters = converted("fp8_rowwise")
    run = lambda x: functional_call(model, parameters, (x,)).square().sum()  # noqa: E731
    x = torch.randn(2, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^linear: got a gradient of its gradient; "):
        grad(lambda x: grad(run)(x).square().sum())(x.detach())
    (gradient,) = torch.autograd.grad(run(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^linear: got a gradient of its gradient; "):
        gradient.square().sum().backward()


def test_a_second_backward_through_a_retained_graph_doubles_the_gradient() -> None:
    model, _ = converted("fp8_delayed")
    x = torch.randn(4, 32)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    assert len(once) == 4
    for first, parameter in zip(once, model.parameters(), strict=True):
        assert torch.equal(parameter.grad, 2 * first)
