"""Grouped products and experts by a recipe."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mixprec
from mixprec.grouped import grouped_mm

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
ENDS = {
    "uneven": [3, 4, 10],
    "an empty group": [3, 3, 10],
    "the first and the last empty": [0, 10, 10],
    "rows behind": [2, 4, 7],
    "all empty": [0, 0, 0],
}


def offsets(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8", "fp64_emulated"])
def test_each_group_is_a_linear_layer(ends: list[int], recipe: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(*shape, requires_grad=True) for shape in ((10, 32), (3, 32, 16)))
    found = grouped_mm(a, b, offsets(ends), recipe=recipe)
    expected = torch.zeros(10, 16)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        expected[start:end] = mixprec.linear(a[start:end], b[group].t(), recipe=recipe)
    assert torch.equal(found, expected)
    g = torch.randn_like(found)
    grads = torch.autograd.grad(found, (a, b), g)
    for mine, theirs in zip(grads, torch.autograd.grad(expected, (a, b), g), strict=True):
        assert torch.equal(mine, theirs)
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert (grads[1][group].count_nonzero() == 0) == (start == end)


def test_batched_groups_bias_and_type() -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(3, 5, 8), torch.randn(3, 8, 4), torch.randn(3, 4)
    found = grouped_mm(a, b, bias=bias, out_dtype=torch.bfloat16, recipe="fp64_emulated")
    assert found.dtype == torch.bfloat16
    expected = (a.double() @ b.double() + bias.double()[:, None]).float().bfloat16()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("a", "b", "offs", "message"),
    [
        ((4, 8), (8, 4), [4], r"^mat_a: got shapes \(4, 8\) and \(8, 4\), offs; must be"),
        ((4, 8), (2, 8, 4), None, r"^mat_a: got shapes .*, no offs; must be"),
        ((4, 8), (2, 8, 4), [5, 3], r"^offs: got \[5, 3\] for 4 rows and 2 groups; must be one"),
        ((4, 8), (2, 8, 4), [2, 5], r"^offs: got \[2, 5\] for 4 rows"),
        ((4, 8), (2, 8, 4), [4], r"^offs: got \[4\] for 4 rows and 2 groups"),
    ],
)
def test_other_shapes_are_refused(
    a: tuple[int, ...], b: tuple[int, ...], offs: list[int] | None, message: str
) -> None:
    ends = None if offs is None else offsets(offs)
    with pytest.raises(ValueError, match=message):
        grouped_mm(torch.zeros(a), torch.zeros(b), ends, recipe="fp8_rowwise")


class Experts(nn.Module):
    """Experts as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 32) * 0.1)
        self.down = nn.Parameter(torch.randn(3, 32, 16) * 0.1)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = F.relu(F.grouped_mm(x, self.up, offs=ends))
        return F.grouped_mm(hidden, self.down, offs=ends)


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "nvfp4", "mxfp8"])
def test_experts_follow_the_recipe_and_train(recipe: str) -> None:
    torch.manual_seed(0)
    experts, x, ends = Experts(), torch.randn(10, 16), offsets([4, 4, 10])
    keys = list(experts.state_dict())
    (row,) = mixprec.convert(experts, recipe).converted
    assert row.type == "Experts"
    hidden = grouped_mm(x, experts.up, ends, recipe=recipe, noise=mixprec.Noise(seed=0))
    out = grouped_mm(F.relu(hidden), experts.down, ends, recipe=recipe, noise=mixprec.Noise(seed=0))
    assert torch.equal(experts(x, ends), out)
    assert mixprec.convert(experts, recipe).converted == (row,)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        loss = (experts(x, ends) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert experts.up.grad[1].count_nonzero() == 0
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    mixprec.revert(experts)
    assert type(experts) is Experts
    assert list(experts.state_dict()) == keys


@pytest.mark.filterwarnings("ignore:convert. nothing was converted")
def test_delayed_scaling_is_left_alone_with_a_reason() -> None:
    (row,) = mixprec.convert(Experts(), "fp8_delayed").rows
    assert row.status == "left"
    assert "delayed scaling" in row.reason
