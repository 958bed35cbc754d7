"""What runs where: on this machine, on hardware that is not here, with libraries that break."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mixprec import survey
from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm import GemmSpec, native
from mixprec.gemm.impl import bf16_mm, scaled_mm
from mixprec.quantization import QuantSpec, quantize
from mixprec.recipes import RECIPES, Recipe, get_recipe
from mixprec.survey import native_support

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
E4M3 = QuantSpec(format=FORMATS["e4m3"])
E5M2 = QuantSpec(format=FORMATS["e5m2"])


def recipe_of(a: QuantSpec | None, b: QuantSpec | None) -> Recipe:
    """A recipe with one quantised product."""
    return Recipe(output=GemmSpec(a=a, b=b))


@pytest.mark.parametrize(
    ("fmt", "capability", "native", "reason"),
    [
        ("e2m1", (9, 0), False, "no units in Hopper (9.0); Blackwell (10.0) has"),
        ("e2m1", (10, 0), True, "native on Blackwell (10.0)"),
        ("e3m2", (10, 0), False, "Blackwell (10.0) has units, but torch has no type"),
        ("e4m3", (8, 0), False, "no units in Ampere (8.0); Ada (8.9) has"),
        ("e4m3", (8, 9), True, "native on Ada (8.9)"),
        ("bf16", (7, 5), False, "no units in Turing (7.5); Ampere (8.0) has, older than CDNA 3"),
        ("e4m3fnuz", (9, 0), False, "no units in Hopper (9.0); CDNA 3 (9.4) has"),
        ("e8m0", (10, 0), False, "no units in Blackwell (10.0); no GPU of the table has"),
        ("fp64", (7, 0), True, "native on Volta (7.0)"),
    ],
)
def test_native_support_of_a_format(
    fmt: str, capability: tuple[int, int], native: bool, reason: str
) -> None:
    found = native_support(FORMATS[fmt], capability)
    assert (found.name, found.native) == (fmt, native)
    assert found.reason.startswith(reason)


def test_native_support_knows_vendors_and_custom_formats() -> None:
    assert native_support(FORMATS["e4m3fnuz"], (9, 4), vendor="amd").native
    assert not native_support(FORMATS["e4m3"], (9, 4), vendor="amd").native
    assert native_support(FloatFormat(exponent=4, mantissa=3, specials="nan"), (9, 0)).native
    assert not native_support(FloatFormat(exponent=4, mantissa=3), (9, 0)).native


@pytest.mark.parametrize(
    ("version", "native"), [("2.0.1", False), ("2.1.0", True), ("2.13.0+cpu", True), ("10.0", True)]
)
def test_native_support_needs_torchs_type(version: str, native: bool) -> None:
    found = native_support(FORMATS["e4m3"], (9, 0), version)
    assert found.native == native
    if not native:
        assert found.reason == "needs torch 2.1, this is 2.0"


@pytest.mark.parametrize(
    ("name", "capability", "note"),
    [
        (
            "fp8_rowwise",
            (9, 0),
            "; FP8 sums in about 13 fraction bits, collected in FP32 every 128",
        ),
        ("fp8_tensorwise", (8, 9), "; FP8 sums in about 13 fraction bits (measured; no bound is"),
        ("fp8_rowwise", (10, 0), ""),
        ("fp32", (9, 0), ""),
    ],
)
def test_native_support_says_where_sums_take_fewer_bits(
    name: str, capability: tuple[int, int], note: str
) -> None:
    recipe = get_recipe(name)
    place = native_support(FORMATS["fp32"], capability).reason
    found = native_support(recipe, capability)
    assert found.native
    assert found.reason.startswith(f"{place}{note}")
    assert bool(note) == (found.reason != place)
    fp8 = native_support(FORMATS["e4m3"], capability).reason
    assert fp8.startswith(f"{place}; FP8 sums") == (capability < (10, 0))


def test_local_support_says_where_sums_take_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(survey, "resolve_spec", lambda *_: ("scaled_mm", "native"))
    found = survey.local_support(get_recipe("fp8_rowwise"))
    assert (found.native, set(found.impls.values())) == (True, {"scaled_mm"})
    assert found.reason.startswith("native; FP8 sums in about 13 fraction bits, collected in FP32")
    assert "132 * 2^-13 * scale * sum|a||b|" in found.reason
    assert survey.local_support(get_recipe("fp32")).reason == "high precision: torch's own product"


def test_native_support_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="torch_version: got 'main'; must start with two numbers"):
        native_support(FORMATS["e4m3"], (9, 0), "main")
    with pytest.raises(ValueError, match="vendor: got 'intel'"):
        native_support(FORMATS["e4m3"], (9, 0), vendor="intel")


def test_torch_types_are_in_this_torch() -> None:
    aliases = {"e4m3": "float8_e4m3fn", "e2m1": "float4_e2m1fn_x2"}
    for name in survey.TORCH_TYPES:
        assert hasattr(torch, aliases.get(name, f"float8_{name}"))


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({}, {"fp64", "fp32"}),
        ({"AVX-512 BF16": True}, {"fp64", "fp32", "bf16"}),
        ({"AMX BF16": True, "AVX-512 FP16": True}, {"fp64", "fp32", "bf16", "fp16"}),
    ],
)
def test_native_support_on_a_cpu(features: dict[str, bool], expected: set[str]) -> None:
    supports = [native_support(fmt, None, features=features) for fmt in FORMATS.values()]
    assert {support.name for support in supports if support.native} == expected
    assert all("this CPU" in support.reason for support in supports)
    assert native_support(get_recipe("fp32"), None).native
    assert not native_support(get_recipe("fp8_rowwise"), None).native


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_native_support_of_a_recipe_agrees_with_the_implementation(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPES[name]
    monkeypatch.setattr(native, "device_facts", lambda x: ("cuda", capability))
    refusals = []
    for product in ("output", "grad_input", "grad_weight"):
        gemm = getattr(recipe, product)
        if gemm == GemmSpec():
            continue
        a, b = (
            quantize(torch.zeros(32, 32), dataclasses.replace(spec, amax_history_len=0))
            for spec in (gemm.a, gemm.b)
        )
        impls = (bf16_mm,) if gemm.a.format == FORMATS["bf16"] else (scaled_mm,)
        refusals += [impl.why_not(a, b, torch.float32) for impl in impls]
    assert native_support(recipe, capability).native == (not any(refusals))


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (E5M2, E5M2, "e5m2: the units multiply it with e4m3 only"),
        (E4M3, None, "e4m3: no units multiply it with an operand in high precision"),
        (
            QuantSpec(format=FORMATS["bf16"], scale_rule="none"),
            E4M3,
            "bf16: no implementation multiplies it natively",
        ),
        (
            QuantSpec(format=FORMATS["e4m3"], block=(1, 32)),
            E4M3,
            r"blocks of \(1, 32\): no implementation has their scales natively",
        ),
        (QuantSpec(format=FORMATS["e2m1"]), E4M3, r"e2m1: no units in Hopper \(9.0\)"),
    ],
)
def test_native_support_of_a_recipe_names_the_obstacle(
    a: QuantSpec, b: QuantSpec | None, reason: str
) -> None:
    found = native_support(recipe_of(a, b), (9, 0))
    assert not found.native
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.reason)


def test_local_support_on_a_cpu_names_the_implementation() -> None:
    plain = survey.local_support(get_recipe("fp32"))
    assert (plain.native, set(plain.impls.values())) == (True, {"torch"})
    found = survey.local_support(get_recipe("fp8_rowwise_hp_grad_weight"))
    if not torch.cuda.is_available():
        assert not found.native
        assert found.impls == {
            "output": "emulated",
            "grad_input": "emulated",
            "grad_weight": "torch",
        }
        assert "device: " in found.reason


@pytest.mark.parametrize(
    ("impl", "name", "native"),
    [("bf16_mm", "bf16", True), ("bf16_mm", "fp8_rowwise", False), ("emulated", "bf16", False)],
)
def test_local_support_on_bf16_units_is_native_for_bf16_alone(
    impl: str, name: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "resolve_spec", lambda *_: (impl, "why"))
    assert survey.local_support(RECIPES[name]).native == native


def test_local_support_takes_a_custom_recipe_with_noise() -> None:
    spec = QuantSpec(format=FloatFormat(exponent=3, mantissa=1), rounding="stochastic")
    found = survey.local_support(recipe_of(spec, spec))
    assert (found.name, found.native) == ("custom", False)


def test_device_on_which_torch_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution")

    monkeypatch.setattr(survey, "resolve_spec", fail)
    found = survey.local_support(get_recipe("fp8_tensorwise"))
    assert (found.native, found.impls) == (False, {})
    assert found.reason.startswith("torch fails on ")
    assert found.reason.endswith("CUDA error: no kernel image is available for execution")


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
