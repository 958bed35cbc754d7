"""Tables that nothing is cut from, and JSON that is JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from types import MappingProxyType

import pytest

from mixprec.cli.output import grouped_by_reason, print_json, print_table
from mixprec.support import Support


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def test_numbers_stay_whole_and_text_goes_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        ("name", "what it is", "size in bytes"),
        [("first", "a text of several words that is long", "1234567")],
        numeric={"size in bytes"},
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    assert "1234567" in out
    assert "…" not in out
    assert [line.split()[0] for line in out.splitlines() if "1234567" in line] == ["first"]
    assert "first" in out.split("several")[0]


def test_columns_that_do_not_fit_follow_under_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    headings = ("recipe", *(f"number {i}" for i in range(7)))
    rows = [(name, *(f"{i}.1234567" for i in range(7))) for name in ("fp32", "a_long_recipe_name")]
    print_table(headings, rows, title="All of them", numeric=headings[1:])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    assert out.count("All of them") == 1
    cells = [line.split() for line in out.splitlines()]
    for name, *numbers in rows:
        found = [word for row in cells if row and row[0] == name for word in row[1:]]
        assert found == numbers


@pytest.mark.parametrize("width", range(12, 30))
def test_two_long_columns_lose_no_word(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{letter * 4}{i}" for letter in "abc" for i in range(6)]
    first = "x" * width + " " + " ".join(words)
    print_table(("name and purpose", "effect"), [(first, " ".join(words)), ("a\nb", "c")])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    for word in words:
        assert out.split().count(word) == 2
    assert "x" * width in out


def test_word_longer_than_the_line_goes_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "value"), [("first", "y" * 90)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    assert out.count("y") == 90


def test_markup_in_cells_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a",), [("[bold]x[/bold] :smile:",)])
    assert "[bold]x[/bold] :smile:" in capsys.readouterr().out


@dataclass(frozen=True, slots=True)
class Record:
    """A record that holds a read-only mapping."""

    values: MappingProxyType[str, tuple[int, ...]]


def test_json_of_records(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"record": Record(MappingProxyType({"a": (1, 2)}))})
    assert json.loads(capsys.readouterr().out) == {"record": {"values": {"a": [1, 2]}}}


def test_json_refuses_what_is_none() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        print_json({"loss": math.nan})
    with pytest.raises(TypeError, match="dataclass"):
        print_json({"value": object()})


def test_grouped_by_reason_keeps_the_order() -> None:
    def support(native: bool, reason: str) -> Support:
        return Support(name="", native=native, impls={}, reason=reason)

    given = {"a": support(True, "x"), "b": support(False, "y"), "c": support(True, "x")}
    assert grouped_by_reason(given) == [("native", "a\nc", "x"), ("emulated", "b", "y")]
