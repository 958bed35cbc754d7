"""alarms.py: each rule on figures by hand, on both sides of its limit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mixprec.inspection.alarms import (
    LOST_SHARE,
    LOWEST_LOSS_SCALE,
    SAMPLES_IN_A_ROW,
    SATURATION_SHARE,
    STALE_FACTOR,
    Alarm,
    AlarmWatch,
    lost_updates,
    nonfinite,
    nothing_converted,
    nothing_in_region,
    nothing_multiplied,
    saturation,
)
from mixprec.inspection.nonfinite import NonFinite, TensorRange
from mixprec.inspection.statistics import OperandStatistics, ProductStatistics
from mixprec.inspection.updates import UpdateStatistics
from mixprec.nn.report import Report, ReportRow

ROW = OperandStatistics(
    layer="fc1",
    product="output",
    operand="a",
    name="",
    format="e4m3",
    amax=2.0,
    range_use=1.0,
    saturation=0.0,
    underflow=0.0,
    sqnr_db=30.0,
    scale=2.0 / 448,
    elements=1000,
)
GRADIENT = replace(ROW, product="grad_input", format="e5m2")
UPDATE = UpdateStatistics(
    parameter="fc1.weight",
    format="bfloat16",
    elements=100,
    moving=80,
    lost=0,
    largest_gradient=1.0,
)


def kinds(alarms: list[Alarm]) -> list[str]:
    return [alarm.kind for alarm in alarms]


def rows_told(watch: AlarmWatch, *samples: OperandStatistics, every: int = 1) -> list[list[str]]:
    """The kinds of each sample's alarms; the samples are ``every`` steps apart."""
    steps = range(every, every * len(samples) + 1, every)
    return [
        kinds(watch.observe(step, rows=[row])) for step, row in zip(steps, samples, strict=True)
    ]


# ---- a scale that rests


def test_a_scale_that_rests_while_amax_moves() -> None:
    watch = AlarmWatch()
    assert rows_told(watch, ROW, replace(ROW, amax=2.0 * STALE_FACTOR * 0.99)) == [[], []]
    (alarm,) = watch.observe(30, rows=[replace(ROW, amax=2.0 * STALE_FACTOR)])
    assert (alarm.kind, alarm.layer, alarm.operand) == ("stale_scale", "fc1", "output.a")
    assert alarm.figures == {
        "scale": 2.0 / 448,
        "steps": 29,
        "smallest_amax": 2.0,
        "largest_amax": 8.0,
    }
    assert "for 29 steps while amax moved between 2 and 8" in alarm.text
    assert "mixprec.attach" in alarm.suggestion


@pytest.mark.parametrize(
    "second",
    [
        replace(ROW, amax=100.0, scale=ROW.scale * 1.001),
        replace(ROW, amax=0.0),
        replace(ROW, amax=math.inf),
        replace(ROW, amax=math.nan, scale=math.nan),
        replace(ROW, amax=2.0),
    ],
)
def test_a_scale_that_moves_or_an_amax_that_does_not(second: OperandStatistics) -> None:
    assert rows_told(AlarmWatch(), ROW, second, second) == [[], [], []]


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
def test_formats_without_a_scale(name: str) -> None:
    plain = replace(ROW, format=name, scale=1.0)
    assert rows_told(AlarmWatch(), plain, replace(plain, amax=1e4)) == [[], []]


def test_a_history_holds_a_scale_as_long_as_it_is() -> None:
    low = replace(ROW, amax=2e-3)
    # the first amax is the scale of its own step and of 16 more
    assert rows_told(AlarmWatch(history=16), ROW, *[low] * 16) == [[]] * 17
    assert rows_told(AlarmWatch(history=16), ROW, *[low] * 17)[-1] == ["stale_scale"]
    assert rows_told(AlarmWatch(history=16), ROW, low, every=100) == [[], ["stale_scale"]]


# ---- gradients that die


@pytest.mark.parametrize(
    "dead",
    [
        replace(GRADIENT, amax=0.0, sqnr_db=math.inf),
        replace(GRADIENT, underflow=0.7, sqnr_db=0.0),
    ],
)
def test_a_gradient_that_became_zero(dead: OperandStatistics) -> None:
    watch = AlarmWatch()
    assert rows_told(watch, GRADIENT, *[dead] * (SAMPLES_IN_A_ROW - 1), GRADIENT) == [
        [] for _ in range(SAMPLES_IN_A_ROW + 1)
    ]
    assert rows_told(watch, *[dead] * SAMPLES_IN_A_ROW)[-1] == ["dead_gradient"]
    assert rows_told(watch, dead, dead) == [[], []]


def test_gradients_that_were_never_there_and_other_operands() -> None:
    dead = replace(GRADIENT, amax=0.0)
    assert rows_told(AlarmWatch(), *[dead] * 5) == [[]] * 5
    assert rows_told(AlarmWatch(), ROW, *[replace(ROW, amax=0.0)] * 5) == [[]] * 6
    empty = replace(dead, elements=0)
    assert rows_told(AlarmWatch(), GRADIENT, *[empty] * 5) == [[]] * 6


def test_a_parameter_whose_gradient_became_zero() -> None:
    watch, dead = AlarmWatch(), replace(UPDATE, moving=0)
    told = [watch.observe(step, updates=[each]) for step, each in enumerate([UPDATE, dead, dead])]
    assert [kinds(each) for each in told] == [[], [], ["dead_gradient"]]
    assert (told[-1][0].layer, told[-1][0].operand) == ("fc1", "weight")
    assert told[-1][0].figures == {"elements": 100, "moving": 0}


# ---- saturation, lost updates, the loss scale


def test_saturation_above_a_share() -> None:
    assert saturation(replace(ROW, saturation=SATURATION_SHARE)) is None
    assert saturation(replace(ROW, saturation=math.nan)) is None
    alarm = saturation(replace(ROW, saturation=0.034, range_use=1.7, name="q"))
    assert alarm is not None
    assert (alarm.operand, alarm.figures["saturation"]) == ("q.output.a", 0.034)
    assert alarm.text == "3.4 % of the elements saturate in e4m3; amax 2 is 1.7 of its range"


def test_saturation_of_two_samples_in_a_row() -> None:
    bad = replace(ROW, saturation=0.04)
    assert rows_told(AlarmWatch(), bad, ROW, bad, bad, bad) == [[], [], [], ["saturation"], []]
    assert rows_told(AlarmWatch(saturation_share=0.05), bad, bad) == [[], []]


def test_of_several_operands_of_a_layer_the_one_that_saturates_most() -> None:
    rows = [
        replace(ROW, saturation=share, operand=side) for side, share in (("a", 0.1), ("b", 0.3))
    ]
    watch = AlarmWatch()
    assert watch.observe(1, rows=rows) == []
    (alarm,) = watch.observe(2, rows=rows)
    assert (alarm.operand, alarm.figures["saturation"]) == ("output.b", 0.3)


def test_updates_below_half_an_ulp() -> None:
    assert lost_updates(replace(UPDATE, lost=int(80 * LOST_SHARE))) is None
    alarm = lost_updates(replace(UPDATE, lost=60))
    assert alarm is not None
    assert (alarm.layer, alarm.operand, alarm.figures["lost"]) == ("fc1", "weight", 0.75)
    assert "75 % of the updates of fc1.weight" in alarm.text
    watch = AlarmWatch(lost_share=0.1)
    assert kinds(watch.observe(3, updates=[replace(UPDATE, lost=9)])) == ["lost_updates"]


@pytest.mark.parametrize(
    ("scales", "floor", "expected"),
    [
        ([65536.0, 32768.0, LOWEST_LOSS_SCALE], 1.0, None),
        ([65536.0, LOWEST_LOSS_SCALE, LOWEST_LOSS_SCALE / 2], 1.0, 3),
        ([65536.0, 64.0, 32.0], 32.0, 3),
        ([4.0, 4.0, 4.0], 1.0, None),
        ([1.0, 2.0, 4.0], 1.0, None),
    ],
)
def test_a_loss_scale_that_collapses(
    scales: list[float], floor: float, expected: int | None
) -> None:
    watch = AlarmWatch(min_scale=floor)
    told = [watch.observe(step, loss_scale=scale) for step, scale in enumerate(scales, start=1)]
    assert [step for step, alarms in enumerate(told, start=1) if alarms] == (
        [] if expected is None else [expected]
    )
    if expected:
        (alarm,) = told[expected - 1]
        assert alarm.figures == {"loss_scale": scales[2], "highest": 65536.0, "floor": floor}


# ---- nothing quantised, not finite


def report(*status: Any, asked: bool = True) -> Report:
    rows = [
        ReportRow(name=f"m{i}", type="Linear", status=s, reason="why") for i, s in enumerate(status)
    ]
    return Report(rows=tuple(rows), asked=asked)


def test_a_conversion_that_converted_nothing() -> None:
    alarm = nothing_converted(report("left", "left"))
    assert alarm is not None
    assert (alarm.kind, alarm.text) == (
        "nothing_quantised",
        "none of 2 modules was converted: why",
    )
    assert nothing_converted(report("left", "converted")) is None
    assert nothing_converted(report("left", asked=False)) is None


def test_converted_layers_and_regions_that_did_nothing() -> None:
    alarm = nothing_multiplied(report("converted", "left", "converted"))
    assert alarm is not None
    assert alarm.text == "none of 2 converted layers made a product in a step: m0, m2"
    assert nothing_multiplied(report("left")) is None
    alarm = nothing_in_region("bfloat16", 7, 0)
    assert alarm is not None
    assert alarm.text == "none of the 7 operations in the region ran in bfloat16"
    assert nothing_in_region("bfloat16", 7, 1) is nothing_in_region("bfloat16", 0, 0) is None


def tensor_range(name: str = "", **figures: Any) -> TensorRange:
    values = {"smallest": -1.5, "largest": 2.0, "nan": 0, "inf": 0, **figures}
    return TensorRange(name=name, dtype="float32", shape=(2, 3), **values)


def test_a_result_that_is_not_finite() -> None:
    fault = NonFinite(
        operation="log",
        module="blocks.0",
        phase="forward",
        node="",
        inputs=(tensor_range(),),
        output=tensor_range(smallest=None, largest=None, nan=6),
        order=3,
    )
    alarm = nonfinite(fault)
    assert (alarm.kind, alarm.layer) == ("nonfinite", "blocks.0")
    assert alarm.text == (
        "first in forward: log in blocks.0, forward: float32 [2, 3] -1.5 to 2 -> float32 [2, 3] "
        "nothing finite, 6 nan"
    )
    assert alarm.figures == {
        "input0_smallest": -1.5,
        "input0_largest": 2.0,
        "input0_nan": 0,
        "input0_inf": 0,
        "output_nan": 6,
        "output_inf": 0,
    }
    before = replace(fault, operation="", module="", output=tensor_range("fc.weight", inf=1))
    assert nonfinite(before).layer == "fc"


# ---- the watch


def test_each_kind_of_a_layer_is_told_once() -> None:
    watch, bad = AlarmWatch(), replace(UPDATE, lost=70)
    other = replace(bad, parameter="fc2.weight")
    told = [kinds(watch.observe(step, updates=[bad, bad])) for step in range(3)]
    assert told == [["lost_updates"], [], []]
    (alarm,) = watch.observe(4, updates=[bad, other])
    assert alarm.layer == "fc2"
    assert watch.observe(5, updates=[bad], loss_scale=65536.0) == []


def test_rows_of_products_are_passed_by() -> None:
    row = ProductStatistics(layer="fc1", product="output", name="", sqnr_db=3.0)
    assert AlarmWatch().observe(1, rows=[row]) == []


def test_a_line_of_metrics() -> None:
    alarm = nothing_in_region("float16", 7, 0)
    assert alarm is not None
    record = alarm.to_record(12)
    assert record["step"] == 12
    assert list(record["alarm"]) == ["kind", "layer", "operand", "figures", "text", "suggestion"]
    assert str(alarm) == f"nothing quantised: {alarm.text}"
