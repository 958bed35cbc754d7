"""Options of `initialize`: scales, what is said, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from amp.leveled import LEVELS, backward, leveled, weighted
from mixprec.amp import initialize, loss_scalers, scale_loss

SINGLE = torch.float32


@pytest.mark.parametrize(
    ("level", "given", "scale", "moves"),
    [
        ("O0", None, 1.0, False),
        ("O1", None, 65536.0, True),
        ("O2", None, 65536.0, True),
        ("O3", None, 1.0, False),
        ("O3", "dynamic", 65536.0, True),
        ("O1", 128.0, 128.0, False),
        ("O1", "128.0", 128.0, False),
        ("O2", 0.5, 0.5, False),
    ],
)
def test_loss_scale_is_the_level_s_or_as_told(
    level: str, given: Any, scale: float, moves: bool
) -> None:
    model, optimizer = leveled(level, weighted(1.0, 1.0), loss_scale=given)
    loss = model(torch.ones(1, 2)).sum()
    with scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == scale * 2
        assert scaled.dtype == SINGLE
        (scaled * math.inf).backward()
    after = loss_scalers(optimizer)[0].get_scale()
    assert after == (scale / 2 if moves else scale)


def test_floor_and_ceiling_of_the_scale() -> None:
    model, optimizer = leveled("O1", weighted(1.0), min_loss_scale=16.0, max_loss_scale=32.0)
    scaler = loss_scalers(optimizer)[0]
    scaler.set_growth_interval(1)
    found = []
    for number in (1.0, 1.0, math.inf, math.inf, 1.0):
        optimizer.zero_grad()
        # the loss is finite, its gradient may not be
        with scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
            (scaled * number).backward()
        found.append(scaler.get_scale())
    assert found == [32.0, 32.0, 16.0, 16.0, 32.0]
    _, other = leveled("O1", min_loss_scale=2.0**20)
    assert loss_scalers(other)[0].get_scale() == 2.0**20
    _, usual = leveled("O1")
    assert loss_scalers(usual)[0].state_dict()["min_scale"] == 1.0
    assert loss_scalers(usual)[0].state_dict()["max_scale"] == 2.0**24


@pytest.mark.parametrize("level", LEVELS)
def test_choice_is_said_on_standard_error(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    leveled(level, verbosity=1)
    said = capsys.readouterr()
    assert said.out == ""
    words = {
        "O0": "operations fp32, parameters fp32, updates plain, loss scale 1.0",
        "O1": "operations fp16, parameters fp32, updates plain, loss scale dynamic",
        "O2": "fp16, parameters fp16, batch norms in fp32, updates masters, loss scale dynamic",
        "O3": "operations fp16, parameters fp16, updates plain, loss scale 1.0",
    }
    assert said.err.startswith(f"mixprec: {level}: ")
    assert words[level] in said.err


@pytest.mark.parametrize(
    ("level", "options", "match"),
    [
        ("O4", {}, r"opt_level: got 'O4'; must be one of O0, O1, O2, O3"),
        ("o1", {}, r"opt_level: got 'o1'; must be one of"),
        (1, {}, r"opt_level: got 1; must be one of"),
        ("O1", {"master_weights": True}, r"master_weights: got True at O1, which keeps all"),
        ("O0", {"master_weights": False}, r"master_weights: got False at O0"),
        ("O1", {"keep_batchnorm_fp32": True}, r"keep_batchnorm_fp32: got True at O1"),
        ("O1", {"keep_batchnorm_fp32": "False"}, r"keep_batchnorm_fp32: got 'False' at O1"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, r"keep_batchnorm_fp32: got 'yes'; must be True"),
        ("O2", {"master_weights": 1.0}, r"master_weights: got 1.0; must be True, False or None"),
        ("O2", {"loss_scale": "large"}, r"loss_scale: got 'large'; must be a number or 'dynamic'"),
        ("O2", {"loss_scale": 0.0}, r"loss_scale: got 0.0; must be 'dynamic', a finite number"),
        ("O2", {"loss_scale": "inf"}, r"loss_scale: got inf; must be 'dynamic', a finite number"),
    ],
)
def test_refusals_name_option_value_and_rule(level: Any, options: Any, match: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=match):
        leveled(level, model, **options)
    assert model.weight.dtype == SINGLE
    leveled("O2", model)


def test_model_has_to_be_in_float32() -> None:
    with pytest.raises(ValueError, match=r"models: got torch.float16 for 1.weight; .*float\(\)"):
        leveled("O2", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).half()))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_model_is_initialised_once(level: str) -> None:
    model, optimizer = leveled(level)
    with pytest.raises(ValueError, match=r"models: got one that has a level already"):
        initialize(model, optimizer, opt_level=level, verbosity=0)


def test_scale_loss_refuses_what_initialize_did_not_make() -> None:
    model, optimizer = leveled("O1", num_losses=2)
    other_model, other = leveled("O1")
    plain = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(ValueError, match=r"optimizers: got a SGD without a loss scale"):
        backward(model, plain, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"optimizers: got 2 that share no loss scale"):
        backward(model, [optimizer, other], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"optimizers: got 0 that share no loss scale"):
        scale_loss(loss, []).__enter__()
    for wrong in (2, -1):
        with pytest.raises(ValueError, match=rf"loss_id: got {wrong}; there are 2 losses"):
            backward(model, optimizer, 1.0, 1.0, loss_id=wrong)
    backward(other_model, other, 1.0, 1.0)
    assert len(loss_scalers(optimizer)) == 2
