"""`mixprec doctor`: the survey as people and programs read it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import torch

from mixprec import survey
from mixprec.formats import FORMATS
from mixprec.hardware import ACCELERATORS
from mixprec.recipes import RECIPES
from mixprec.support import Support, native_support, region_support
from mixprec.variables import Machine, read_variables

HOPPER = survey.Survey(
    versions={"torch": "2.13.0"},
    cpu="AVX512",
    cpu_features={"AVX2": True, "AMX": False},
    devices=(
        survey.Device(
            name="NVIDIA H100 80GB HBM3",
            vendor="nvidia",
            capability=(9, 0),
            memory_bytes=80 * 10**9,
            accelerator=ACCELERATORS["H100"],
        ),
    ),
    libraries=(
        survey.Library(
            name="plotly", purpose="pages", version="", reason="broken, OSError: no x.so"
        ),
    ),
    formats=tuple(native_support(fmt, (9, 0)) for fmt in FORMATS.values()),
    recipes=tuple(native_support(recipe, (9, 0)) for recipe in RECIPES.values()),
    regions=Support(
        name="16-bit regions", native=True, impls={}, reason="on cuda: torch's own 16-bit products"
    ),
    variables=read_variables(
        {"NVIDIA_TF32_OVERRIDE": "0", "CUDA_VISIBLE_DEVICES": ",".join(["GPU-5ebf"] * 16)},
        Machine(cuda=(13, 0), capability=(9, 0)),
    ),
)


def test_table_names_everything(cli: Callable) -> None:
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    assert torch.__version__ in out
    for name in (*FORMATS, *RECIPES, *survey.OPTIONAL_LIBRARIES, *survey.CPU_FEATURES):
        assert name in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_json_is_the_survey(cli: Callable) -> None:
    data = json.loads(cli("doctor", "--json").out)
    found = survey.doctor()
    assert [row["name"] for row in data["recipes"]] == list(RECIPES)
    assert [row["native"] for row in data["recipes"]] == [row.native for row in found.recipes]
    assert data["cpu_features"] == found.cpu_features
    assert data["versions"]["torch"] == torch.__version__


def test_hopper_says_that_fp4_is_emulated(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "doctor", lambda: HOPPER)
    out = cli("doctor").out
    emulated = out.split("emulated   ")[1:]
    fp4 = [row for row in emulated if "e2m1" in row]
    assert ["nvfp4" in row and "mxfp4" in row for row in fp4] == [False, True]
    assert "no units in Hopper (9.0); Blackwell (10.0) has" in fp4[0]
    recipes = fp4[1].split("environment variable")[0].split()
    assert " ".join(recipes) == ("mxfp4 e2m1: no units in Hopper (9.0); nvfp4 Blackwell (10.0) has")
    assert "error up to 132 * 2^-13 * scale * sum|a||b|" in " ".join(out.split())
    assert "NVIDIA H100 80GB HBM3, compute capability 9.0, 80 GB" in " ".join(out.split())
    assert "tf32 494.7" in " ".join(out.split())
    assert "broken, OSError: no x.so" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_says_where_16_bit_products_are_emulated(
    cli: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = region_support(torch.device("cpu"))
    assert not here.native
    assert "operands rounded to 16 bits, FP32 sums, results rounded" in here.reason
    assert region_support(torch.device("meta")).native
    monkeypatch.setattr(survey.torch.cuda, "device_count", lambda: 0)
    out = " ".join(cli("doctor").out.split())
    assert f"Products in 16-bit regions: emulated; {here.reason}" in out
    monkeypatch.setattr(survey, "doctor", lambda: HOPPER)
    out = " ".join(cli("doctor").out.split())
    assert "Products in 16-bit regions: native; on cuda: torch's own" in out


@pytest.mark.parametrize("name", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_warns_where_fp32_convolutions_are_rounded(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    units = Machine(has_onednn=True, cpu_features=frozenset({"AMX BF16"}))
    for machine, warns in ((units, True), (Machine(has_onednn=True), False)):
        found = dataclasses.replace(HOPPER, variables=read_variables({name: "BF16"}, machine))
        monkeypatch.setattr(survey, "doctor", lambda found=found: found)
        out = " ".join(cli("doctor").out.split())
        assert (f"WARNING: {name}=BF16: oneDNN rounds the operands of FP32 conv" in out) == warns
    assert "WARNING" not in cli("doctor").out


def test_hopper_as_json(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "doctor", lambda: HOPPER)
    data = json.loads(cli("doctor", "--json").out)
    assert data["devices"][0]["accelerator"]["rates"] == dict(ACCELERATORS["H100"].rates)


def test_variables_are_listed_with_value_and_effect(
    cli: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O2")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    rows = {row["name"]: row for row in json.loads(cli("doctor", "--json").out)["variables"]}
    assert (rows["AMPLITE_LEVEL"]["value"], rows["AMPLITE_LEVEL"]["has_effect"]) == ("O2", True)
    assert rows["NVIDIA_TF32_OVERRIDE"]["value"] is None
    out = cli("doctor").out
    assert "AMPLITE_LEVEL = 'O2'" in out
    assert all(name in out for name in rows)


def test_long_value_breaks_at_its_commas(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "doctor", lambda: HOPPER)
    out = cli("doctor").out
    assert out.count("GPU-5ebf") == 16
    assert max(map(len, out.splitlines())) <= 80
    (line,) = (line for line in out.splitlines() if "NVIDIA_TF32_OVERRIDE = '0'" in line)
    assert line.rstrip().endswith("yes: set, and read here")
