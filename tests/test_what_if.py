"""what_if.py: a row for every distinct operand, and where the tensors come from."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from mixprec.noise import Noise
from mixprec.quantization_error import quantize_error
from mixprec.recipes import OPERANDS, RECIPES, operands
from mixprec.what_if import SAMPLES, load_data, what_if


def test_every_operand_of_every_recipe_is_in_one_row() -> None:
    rows = what_if(torch.randn(32, 64))
    found = [(name, path) for row in rows for name, paths in row.uses.items() for path in paths]
    want = [
        (name, path)
        for name, recipe in RECIPES.items()
        for path, spec in operands(recipe).items()
        if spec is not None
    ]
    assert sorted(found) == sorted(want)
    assert len({row.spec for row in rows}) == len(rows) > 20
    for row in rows:
        for name, paths in row.uses.items():
            assert {operands(RECIPES[name])[path] for path in paths} == {row.spec}


def test_figures_are_those_of_the_operand_alone() -> None:
    x = torch.randn(32, 64)
    for row in what_if(x, [RECIPES["nvfp4"], RECIPES["mxfp8"]], seed=5):
        noise = Noise(seed=5) if row.spec.is_stochastic else None
        assert row.figures == quantize_error(x, row.spec, noise=noise)


def test_a_recipe_has_its_rows_alone_and_fp32_none() -> None:
    (row,) = what_if(torch.ones(2, 32), [RECIPES["mxfp8"]])
    assert row.uses == {"mxfp8": OPERANDS}
    assert what_if(torch.ones(2, 32), [RECIPES["fp32"], RECIPES["fp64"]]) == ()


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_the_same_for_a_seed(name: str) -> None:
    x = load_data(name)
    assert x.dtype == torch.float32
    assert x.shape == (512, 1024)
    assert x.isfinite().all()
    assert torch.equal(x, load_data(name))
    assert not torch.equal(x, load_data(name, seed=1))


def test_samples_are_what_they_are_called() -> None:
    normal, lognormal, outliers = (load_data(n) for n in ("normal", "lognormal", "outliers"))
    assert normal.std().item() == pytest.approx(1, abs=0.01)
    assert lognormal.abs().log().std().item() == pytest.approx(2, abs=0.02)
    assert (lognormal < 0).float().mean().item() == pytest.approx(0.5, abs=0.01)
    share = (outliers.abs() > 10).float().mean().item()
    assert share == pytest.approx(1e-3, rel=0.2)


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
def test_numpy_file(dtype: str, tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    np.save(tmp_path / "x.npy", array)
    x = load_data(str(tmp_path / "x.npy"))
    assert x.tolist() == array.tolist()
    assert x.element_size() == array.dtype.itemsize


def test_safetensors_file_of_one_tensor_or_of_several(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, dtype=torch.bfloat16)
    one, two = str(tmp_path / "one.safetensors"), str(tmp_path / "two.safetensors")
    safetensors.torch.save_file({"w": weight}, one)
    safetensors.torch.save_file({"layer.w": weight, "b": torch.ones(1)}, two)
    assert torch.equal(load_data(one), weight)
    assert torch.equal(load_data(f"{two}:layer.w"), weight)
    for source in (two, f"{two}:c"):
        with pytest.raises(ValueError, match=re.escape("it holds b, layer.w; name one of them")):
            load_data(source)


def test_other_sources_are_refused_in_a_line(tmp_path: Path) -> None:
    np.save(tmp_path / "int.npy", np.ones(3, dtype=np.int64))
    safetensors.torch.save_file({"i": torch.ones(2, dtype=torch.int8)}, tmp_path / "i.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    for source, match in (
        ("uniform", "must be normal, lognormal, outliers, or a .npy or .safetensors file"),
        ("missing.npy", "cannot be read"),
        ("missing.safetensors", "cannot be read"),
        (str(tmp_path / "bad.safetensors"), "cannot be read"),
        (str(tmp_path / "int.npy"), "int64 in .*; must be float16, float32 or float64"),
        (str(tmp_path / "i.safetensors"), "torch.int8 .* must be floating-point"),
    ):
        with pytest.raises(ValueError, match=rf"^data: got .*{match}"):
            load_data(source)
