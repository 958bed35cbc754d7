"""Gradients of every kind under loss scaling: unscaled once, clipped right, named if unusable."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixprec.amp.grad_scaler import GradScaler

SCALE = 4.0


def scaler_after_scale(scale: float = SCALE) -> GradScaler:
    scaler = GradScaler(init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler


def sgd(*parameters: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0)


def with_grad(grad: Tensor, dtype: torch.dtype | None = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(grad.shape, dtype=dtype or grad.dtype))
    parameter.grad_dtype = grad.dtype
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_unscale_divides_every_type_and_shape(dtype: torch.dtype, shape: Any) -> None:
    grad = torch.full(shape, 12, dtype=dtype)
    weight = with_grad(grad * (1 + 2j) if dtype.is_complex else grad)
    scaler_after_scale().unscale_(sgd(weight))
    expected = 3 + 6j if dtype.is_complex else 3
    assert torch.equal(weight.grad, torch.full(shape, expected, dtype=dtype))


@pytest.mark.parametrize("bad", [complex(math.inf, 0), complex(0, math.nan)])
def test_complex_training_steps_and_skips(bad: complex) -> None:
    weight = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler()
    scaler.scale((weight * weight.conj()).real.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0, 0]
    scaler.scale((weight * weight.conj()).real.sum()).backward()
    weight.grad[1] = bad
    scaler.step(optimizer)
    assert scaler.last_step.cause == "overflow"


def test_conjugated_and_negated_views_are_made_real() -> None:
    base = torch.tensor([4 + 8j])
    conjugated, negated = with_grad(base.conj()), with_grad(base.conj().imag)
    assert negated.grad.is_neg()
    scaler_after_scale().unscale_(sgd(conjugated, negated))
    assert (conjugated.grad.tolist(), negated.grad.tolist()) == ([1 - 2j], [-2.0])
    assert base.tolist() == [4 + 8j]


@pytest.mark.parametrize("sparse", [True, False])
def test_embedding_trains_as_without_a_scaler(sparse: bool) -> None:
    def trained(scaler: torch.amp.GradScaler | None) -> Tensor:
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 3, sparse=sparse)
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
        optimizer = kind(embedding.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = embedding(torch.tensor([1, 1, 4])).square().sum()
            (scaler.scale(loss) if scaler else loss).backward()
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
        return embedding.weight.detach()

    assert torch.equal(trained(GradScaler(init_scale=1024.0)), trained(None))


def sparse_grad(values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor([[1] * len(values)], values, (4,), check_invariants=True)


def test_duplicates_of_a_sparse_gradient_are_summed_before_the_check() -> None:
    finite, overflowing = with_grad(sparse_grad([4.0, 8.0])), with_grad(sparse_grad([3e38, 3e38]))
    scaler = scaler_after_scale()
    scaler.unscale_(sgd(finite))
    assert finite.grad.to_dense().tolist() == [0.0, 3.0, 0.0, 0.0]
    scaler.step(sgd(overflowing))
    assert scaler.last_step.cause == "overflow"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_compressed_sparse_gradient_is_divided_too() -> None:
    weight = nn.Parameter(torch.zeros(2, 2).to_sparse_csr())
    weight.grad = torch.tensor([[0.0, 8.0], [4.0, 0.0]]).to_sparse_csr()
    scaler_after_scale().unscale_(sgd(weight))
    assert weight.grad.to_dense().tolist() == [[0.0, 2.0], [1.0, 0.0]]


def test_expanded_gradient_is_divided_once_in_each_element() -> None:
    one = torch.full((1, 1), 8.0)
    first, second = with_grad(one.expand(3, 2)), with_grad(one.expand(2, 2))
    scaler_after_scale().unscale_(sgd(first, second))
    assert first.grad.tolist() == [[2.0, 2.0]] * 3
    assert second.grad.tolist() == [[2.0, 2.0]] * 2
    assert one.item() == 8.0


@pytest.mark.parametrize("view", [lambda g: g, lambda g: g.view(2, 1)])
def test_gradient_shared_by_two_parameters_is_divided_once(view: Any) -> None:
    shared = torch.full((2,), 8.0)
    first, second = with_grad(shared), with_grad(view(shared))
    scaler = scaler_after_scale()
    scaler.unscale_(sgd(first, second))
    assert shared.tolist() == [2.0, 2.0]
    optimizer = sgd(first, second)
    assert scaler.clip_grad_norm_(optimizer, 2.0).item() == pytest.approx(4.0)
    assert shared.tolist() == pytest.approx([1.0, 1.0])


def test_neighbours_in_one_buffer_are_each_divided() -> None:
    flat = torch.tensor([4.0, 8.0, 12.0])
    first, second = with_grad(flat[:1]), with_grad(flat[1:])
    scaler_after_scale().unscale_(sgd(first, second))
    assert flat.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("fused", [False, True])
def test_parameter_in_two_optimizers_is_divided_once(fused: bool) -> None:
    weight = nn.Parameter(torch.tensor([0.0]))
    optimizers = [sgd(weight), torch.optim.SGD([weight], lr=1.0, fused=fused)]
    scaler = GradScaler(init_scale=SCALE)
    for window in (1, 2):
        scaler.scale(weight.sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert weight.item() == -2.0 * window
        # the gradient's memory is used again, for a new gradient
        weight.grad.zero_()


def test_gradient_made_anew_between_two_optimizers_is_divided_again() -> None:
    weight = nn.Parameter(torch.tensor([0.0]))
    first, second = sgd(weight), sgd(weight)
    scaler = GradScaler(init_scale=SCALE)
    for optimizer, factor in ((first, 1.0), (second, 3.0)):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(factor * weight.sum()).backward()
        scaler.step(optimizer)
    assert weight.item() == -4.0


def test_overflow_of_a_parameter_in_two_optimizers_skips_both() -> None:
    shared, own = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(shared.sum() + own.sum()).backward()
    shared.grad.fill_(math.inf)
    for optimizer in (sgd(shared), sgd(shared, own)):
        scaler.step(optimizer)
        assert scaler.last_step.cause == "overflow"
    assert (shared.item(), own.item()) == (0.0, 0.0)


def test_float16_gradients_are_refused_by_name_and_left_alone() -> None:
    good, bad = with_grad(torch.tensor([8.0])), with_grad(torch.tensor([8.0]).half())
    optimizer = torch.optim.SGD([("head.weight", good), ("lora.weight", bad)], lr=1.0)
    scaler = scaler_after_scale()
    with pytest.raises(
        ValueError, match=r"^lora\.weight: .*unscale FP16 gradients\..*MixedPrecision\(optimizer\)"
    ):
        scaler.step(optimizer)
    assert (good.grad.item(), bad.grad.item()) == (8.0, 8.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_parameters_with_float32_gradients_train(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=dtype))
    weight.grad_dtype = torch.float32
    scaler = GradScaler(init_scale=2.0**10)
    scaler.scale((weight * 3).sum()).backward()
    assert weight.grad.dtype is torch.float32
    optimizer = sgd(weight)
    assert scaler.clip_grad_norm_(optimizer, 100.0).item() == pytest.approx(math.sqrt(18.0))
    assert weight.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("unscales", [False, True])
def test_clip_norm_acts_on_unscaled_gradients(unscales: bool) -> None:
    weight = nn.Parameter(torch.zeros(4))
    optimizer, scaler = sgd(weight), GradScaler(init_scale=65536.0)
    scaler.scale(weight.sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 2.0
    scaler.step(optimizer)
    assert weight.norm().item() == 1.0
    assert scaler.last_step.stepped


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_clip_norm_is_the_norm_over_all_types(norm_type: float) -> None:
    values = [torch.randn(5), torch.randn(2, 3).bfloat16(), torch.randn(4, dtype=torch.complex64)]
    sparse = sparse_grad([2.0, 1.0])
    parts = [value.to(torch.complex128).flatten() for value in (*values, sparse.to_dense())]
    expected = torch.linalg.vector_norm(torch.cat(parts), norm_type)
    parameters = [with_grad(value.clone()) for value in (*values, sparse)]
    norm = scaler_after_scale(1.0).clip_grad_norm_(sgd(*parameters), 0.5, norm_type)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    left = [p.grad.to_dense().to(torch.complex128).flatten() for p in parameters]
    assert torch.linalg.vector_norm(torch.cat(left), norm_type).item() == pytest.approx(
        0.5, rel=2e-3
    )


def test_clip_norm_below_the_limit_changes_no_bit() -> None:
    grad = torch.randn(100)
    weight = with_grad(grad.clone())
    scaler_after_scale(1.0).clip_grad_norm_(sgd(weight), 100.0)
    assert torch.equal(weight.grad, grad)
    zero = with_grad(torch.zeros(2))
    assert scaler_after_scale(1.0).clip_grad_norm_(sgd(zero), 1.0).item() == 0.0
    assert zero.grad.tolist() == [0.0, 0.0]
    assert scaler_after_scale(1.0).clip_grad_norm_(sgd(nn.Parameter(zero)), 1.0).item() == 0.0


def test_norm_of_float16_gradients_does_not_overflow() -> None:
    weight = with_grad(torch.full((1000,), 3000.0).half())
    norm = GradScaler(enabled=False).clip_grad_norm_(sgd(weight), 1.0)
    assert norm.item() == pytest.approx(3000 * math.sqrt(1000), rel=1e-6)
    assert weight.grad.float().norm().item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("by_value", [False, True])
def test_clipping_spreads_no_nan_and_the_step_is_skipped(bad: float, by_value: bool) -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))
    optimizer, scaler = sgd(second, first), GradScaler(init_scale=SCALE)
    scaler.scale(first.sum() * 8 + second.sum() * 8).backward()
    first.grad[1] = bad
    clip = scaler.clip_grad_value_ if by_value else scaler.clip_grad_norm_
    clip(optimizer, 1.0)
    assert (first.grad[0].item(), second.grad.item()) == (8.0, 8.0)
    assert str(first.grad[1].item()) == str(bad)
    scaler.step(optimizer)
    assert scaler.last_step.fault == "parameter 1 of group 0, shape (3,)"


def test_norm_that_overflows_though_gradients_are_finite_skips() -> None:
    weight = with_grad(torch.full((2,), 1e30))
    optimizer, scaler = sgd(weight), scaler_after_scale(1.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == math.inf
    assert weight.grad.tolist() == pytest.approx([1e30] * 2)
    scaler.step(optimizer)
    assert not scaler.last_step.stepped
    assert weight.tolist() == [0.0, 0.0]


def test_clip_value_limits_each_element_of_the_unscaled_gradient() -> None:
    real, narrow = (
        with_grad(torch.tensor([8.0, -8.0, 2.0])),
        with_grad(torch.tensor(8.0).bfloat16()),
    )
    complicated = with_grad(torch.tensor([8 - 2j]))
    scaler_after_scale().clip_grad_value_(sgd(real, narrow, complicated), 1.5)
    assert real.grad.tolist() == [1.5, -1.5, 0.5]
    assert narrow.grad.item() == 1.5
    assert complicated.grad.tolist() == [1.5 - 0.5j]


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_limits_have_to_be_positive(value: float) -> None:
    scaler, optimizer = scaler_after_scale(), sgd(with_grad(torch.ones(1)))
    with pytest.raises(ValueError, match=f"max_norm: got {value!r}"):
        scaler.clip_grad_norm_(optimizer, value)
    with pytest.raises(ValueError, match=f"norm_type: got {value!r}"):
        scaler.clip_grad_norm_(optimizer, 1.0, value)
    with pytest.raises(ValueError, match=f"clip_value: got {value!r}"):
        scaler.clip_grad_value_(optimizer, value)
    with pytest.raises(TypeError, match="max_norm: got True"):
        scaler.clip_grad_norm_(optimizer, True)


def adamw(weight: nn.Parameter, fused: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW([weight], lr=0.1, fused=fused)


@pytest.mark.parametrize("clip", [None, "unscale_", "norm", "value"])
def test_fused_optimizer_steps_skips_and_clips_like_the_plain_one(clip: str | None) -> None:
    trained = []
    for fused in (False, True):
        weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        optimizer, scaler = adamw(weight, fused), GradScaler()
        for overflow in (True, False, False, True, False):
            scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
            if overflow:
                weight.grad[0] = math.inf
            if clip == "unscale_":
                scaler.unscale_(optimizer)
            elif clip == "norm":
                scaler.clip_grad_norm_(optimizer, 1.0)
            elif clip == "value":
                scaler.clip_grad_value_(optimizer, 0.5)
            scaler.step(optimizer)
            assert (weight.grad is None) is overflow
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.state[weight]["step"] == 3
        assert (scaler.skipped_steps, scaler.get_scale()) == (2, 16384.0)
        trained.append(weight.detach())
    torch.testing.assert_close(*trained, rtol=1e-6, atol=0)


def test_new_optimizer_at_the_address_of_a_lost_one_is_not_taken_for_it() -> None:
    scaler, weight = scaler_after_scale(), with_grad(torch.tensor([8.0]))
    lost = sgd(with_grad(torch.tensor([math.inf])))
    scaler.unscale_(lost)
    optimizer = sgd(weight)
    # what a reused address looks like
    scaler._per_optimizer_states[id(optimizer)] = scaler._per_optimizer_states.pop(id(lost))
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == -2.0
    assert scaler.get_scale() == SCALE / 2


def test_fused_optimizer_without_gradients_is_left_alone() -> None:
    optimizer, scaler = adamw(nn.Parameter(torch.ones(2)), True), scaler_after_scale()
    with pytest.warns(UserWarning, match="no parameter with a gradient"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE


class Contracted(torch.optim.SGD):
    """An optimizer that scales by torch's contract and keeps what it was given."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.given = (self.grad_scale.item(), self.found_inf.item())


class Handed(torch.optim.SGD):
    """The older contract: it is handed the scaler and does everything itself."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:  # type: ignore[override]
        grad_scaler.unscale_(self)
        found = grad_scaler._found_inf_per_device(self)
        if not sum(flag.item() for flag in found.values()):
            super().step()
        return "done"


def test_optimizer_that_scales_itself_gets_scale_and_flag_as_from_torch() -> None:
    weight = with_grad(torch.tensor([8.0]))
    optimizer = Contracted([weight], lr=1.0)
    scaler_after_scale().step(optimizer)
    assert optimizer.given == (SCALE, 0.0)
    assert weight.grad.item() == 8.0
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("overflow", [False, True])
def test_optimizer_that_takes_the_scaler_is_handed_it(overflow: bool) -> None:
    weight = with_grad(torch.tensor([math.inf if overflow else 8.0]))
    optimizer, scaler = Handed([weight], lr=1.0), scaler_after_scale()
    with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
        assert scaler.step(optimizer) == "done"
    scaler.update()
    assert weight.item() == (0.0 if overflow else -2.0)
    assert scaler.last_step.stepped is not overflow
    assert scaler.get_scale() == (SCALE / 2 if overflow else SCALE)
