"""What is here: this machine's processor, its libraries also where they break, its GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mixprec import survey
from mixprec.formats import FORMATS
from mixprec.recipes import RECIPES


def test_doctor_covers_the_tables() -> None:
    found = survey.doctor()
    assert [row.name for row in found.recipes] == list(RECIPES)
    assert [row.name for row in found.formats] == list(FORMATS)
    assert found.versions["torch"] == torch.__version__
    assert set(found.cpu_features) == set(survey.CPU_FEATURES)
    assert all(row.reason for row in (*found.recipes, *found.formats))


def test_cpu_features_from_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = tmp_path / "cpuinfo"
    monkeypatch.setattr(survey, "Path", lambda _: listing)
    assert survey._cpu_flags() == frozenset()
    listing.write_text("model name\t: X\nflags\t\t: fpu avx2 f16c amx_tile\n\nflags\t\t: fpu\n")
    features = survey.cpu_features(survey._cpu_flags())
    assert {name for name, present in features.items() if present} == {"AVX2", "F16C", "AMX"}


class Broken:
    """An importer under which one library raises."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name, self.error = name, error

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        raise self.error


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], None]:
    """Makes the import of a library raise an error."""

    def install(name: str, error: BaseException) -> None:
        for loaded in [key for key in sys.modules if key.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setattr(sys, "meta_path", [Broken(name, error), *sys.meta_path])

    return install


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ImportError("undefined symbol: _ZN2at\n in x.so"),
            "ImportError: undefined symbol: _ZN2at in",
        ),
        (OSError("libcudart.so.12: cannot open"), "OSError: libcudart.so.12: cannot open"),
        (ModuleNotFoundError("No module named 'pandas'", name="pandas"), "ModuleNotFoundError: No"),
        (AttributeError("numpy has no attribute 'bool'"), "AttributeError: numpy has no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_broken_library_is_reported_never_raised(
    broken: Callable[[str, BaseException], None], error: Exception, reason: str
) -> None:
    broken("plotly", error)
    (found,) = (row for row in survey.doctor().libraries if row.name == "plotly")
    assert not found.is_usable
    assert found.reason.startswith(f"broken, {reason}")
    assert "\n" not in found.reason


def test_missing_and_present_libraries() -> None:
    missing = survey.library("no_such_library", "nothing")
    assert (missing.is_usable, missing.version, missing.reason) == (False, "", "not installed")
    assert survey.library("numpy", "arrays").is_usable
