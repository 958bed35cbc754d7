"""cuBLAS's environment variables as defaults of emulated FP64."""

from __future__ import annotations

import dataclasses

import pytest

from mixprec import cublas
from mixprec.cublas import Emulation
from mixprec.fp64.settings import Settings, settings_from_environment

NAMES = (cublas.DOUBLE, cublas.STRATEGY, cublas.BITS, cublas.SPECIAL_VALUES)


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_those_of_cublas() -> None:
    assert settings_from_environment() == Settings(
        enabled=False, strategy="performant", bits="auto", special_values=None
    )
    assert Settings() == settings_from_environment()


def test_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("1", "eager", "79", "3"), strict=True):
        monkeypatch.setenv(name, value)
    assert settings_from_environment() == Settings(
        enabled=True, strategy="eager", bits=79, special_values=("inf", "nan")
    )
    monkeypatch.delenv(cublas.BITS)
    assert settings_from_environment().bits == "auto"
    monkeypatch.setenv(cublas.DOUBLE, "0")
    assert not settings_from_environment().enabled


@pytest.mark.parametrize("fp64", [55, "auto", "off"])
@pytest.mark.parametrize("strategy", ["performant", "eager"])
@pytest.mark.parametrize("values", [(), ("nan",), ("inf", "nan")])
def test_what_the_launcher_sets_is_what_the_library_reads(
    monkeypatch: pytest.MonkeyPatch, fp64: int | str, strategy: str, values: tuple[str, ...]
) -> None:
    settings = Emulation(fp64=fp64, strategy=strategy, special_values=values)
    for name, value in settings.environment().items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert settings_from_environment() == Settings(
        enabled=fp64 != "off",
        strategy=strategy,
        bits=fp64 if fp64 == 55 else "auto",
        special_values=values,
    )


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        (cublas.DOUBLE, "true", "must be 0 or 1"),
        (cublas.STRATEGY, "Eager", "must be performant or eager"),
        (cublas.BITS, "0", "must be a whole number from 1 on"),
        (cublas.BITS, "", "must be a whole number from 1 on"),
        (cublas.BITS, "55.0", "must be a whole number from 1 on"),
        (cublas.SPECIAL_VALUES, "4", "must be 0 to 3"),
    ],
)
def test_wrong_value_is_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, rule: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: got {value!r}; {rule}; unset it"):
        settings_from_environment()


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().bits = 7  # type: ignore[misc]
