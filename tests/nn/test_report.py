"""The report of a conversion: every module, what became of it, and why."""

from __future__ import annotations

import pytest
from torch import nn

import mixprec
from mixprec.gemm import IMPLS
from mixprec.nn import ReportRow


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
            "body": nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 10)),
            "attention": nn.MultiheadAttention(16, 2),
            "scale": nn.LayerNorm(16, elementwise_affine=False),
        }
    )


def test_every_module_has_one_row_in_the_order_of_the_model() -> None:
    net = model()
    report = mixprec.convert(net, "fp8_tensorwise", multiple_of=16)
    containers = {"", "stem", "body"}
    assert [row.name for row in report.rows] == [
        name for name, _ in net.named_modules() if name not in containers
    ]
    assert set(report.converted) | set(report.left) == set(report.rows)
    assert len(report.converted) + len(report.left) == len(report.rows)


def test_rows_say_what_became_of_a_module_and_why() -> None:
    rows = {row.name: row for row in mixprec.convert(model(), "tensorwise", multiple_of=16).rows}
    assert rows["body.0"] == ReportRow(
        name="body.0",
        type="Linear",
        status="converted",
        recipe="fp8_tensorwise",
        impl=rows["body.0"].impl,
        formats=("e4m3", "e5m2 x e4m3", "e5m2 x e4m3"),
        multiplications=16 * 16,
        bits="8",
    )
    assert rows["body.0"].impl in IMPLS
    assert rows["body.2"] == ReportRow(
        name="body.2",
        type="Linear",
        status="left",
        reason="sizes 16 and 10 are not multiples of 16",
        formats=("fp32", "fp32", "fp32"),
        multiplications=16 * 10,
        bits="32",
    )
    assert rows["stem.2"].reason == rows["scale"].reason == "no parameters"
    assert rows["stem.1"].reason == "BatchNorm2d is not covered"
    assert all(row.reason for row in rows.values() if row.status == "left")


@pytest.mark.parametrize("impl", ["emulated", "scaled_mm"])
def test_impl_that_was_asked_for_is_reported(impl: str) -> None:
    layer = nn.Linear(16, 16)
    try:
        report = mixprec.convert(layer, "fp8_tensorwise", impl=impl)
    except ValueError:
        pytest.skip(f"{impl} does not run here")
    assert [row.impl for row in report.converted] == [impl]
    assert layer.impl == impl


def test_table_counts_and_names_every_module() -> None:
    report = mixprec.convert(model(), "fp8_rowwise")
    text = str(report)
    assert "5 converted, 4 left alone" in text
    for row in report.rows:
        assert row.name in text
    for heading in ("module", "type", "status", "recipe", "impl", "why"):
        assert heading in text


def test_table_of_a_model_that_is_one_layer_names_it() -> None:
    assert "(model)" in str(mixprec.convert(nn.Linear(4, 4), "fp8_rowwise"))


def test_table_says_loudly_that_nothing_was_converted() -> None:
    with pytest.warns(UserWarning, match="nothing was converted"):
        report = mixprec.convert(model(), "fp8_rowwise", skip=("*",))
    assert "NOTHING WAS CONVERTED" in str(report)
    assert report.converted == ()


def test_warning_points_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="nothing was converted") as caught:
        mixprec.convert(nn.ReLU(), "fp8_rowwise")
    assert [warning.filename for warning in caught] == [__file__]


def test_a_report_is_a_value() -> None:
    report = mixprec.convert(model(), "fp8_rowwise")
    assert report == mixprec.convert(model(), "fp8_rowwise")
    assert hash(report.rows)
    with pytest.raises(AttributeError, match="cannot assign"):
        report.rows = ()


def test_layer_prints_its_recipe_and_impl() -> None:
    layer = nn.Linear(4, 8, bias=False)
    mixprec.convert(layer, "fp8_delayed", impl="emulated")
    assert repr(layer) == (
        "QuantizedLinear(in_features=4, out_features=8, bias=False, recipe=fp8_delayed, "
        "impl=emulated)"
    )
