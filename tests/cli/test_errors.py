"""`mixprec errors`: which recipe each layer can bear."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from train.conftest import write_idx_folder

LAYERS = ["1", "3"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("digits")
    file = folder / "small.toml"
    data = f'[data]\npath = "{write_idx_folder(folder)}"\nbatch_size = 2\n'
    file.write_text(f'model = "test_layer_errors:digits_mlp"\n{data}')
    return ["errors", str(file), "--recipes", "mxfp8, nvfp4"]


@pytest.fixture(scope="module")
def document(words: list[str]) -> Callable[..., dict]:
    """The JSON document of a call, made once for each way of calling."""
    known: dict[tuple[str, ...], dict] = {}

    def get(cli: Callable, *more: str) -> dict:
        if more not in known:
            known[more] = json.loads(cli(*words, *more, "--json").out)
        return known[more]

    return get


def test_the_table_has_the_worst_operand_of_each_layer(
    cli: Callable, words: list[str], document: Callable
) -> None:
    code, out, err = cli(*words)
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["layer"] == ["mxfp8", "nvfp4"]
    errors = [row for row in document(cli)["errors"] if row["operand"]]
    for layer in LAYERS:
        for place, recipe in enumerate(("mxfp8", "nvfp4")):
            its = [r for r in errors if (r["layer"], r["recipe"]) == (layer, recipe)]
            assert rows[layer][place] == f"{min(row['sqnr_db'] for row in its):.1f}"


def test_json_has_the_figures(cli: Callable, document: Callable) -> None:
    data = document(cli)
    assert (data["model"], data["checkpoint"]) == ("test_layer_errors:digits_mlp", None)
    operand, _, product = data["errors"][:3]
    assert (operand["product"], operand["operand"]) == ("output", "a")
    assert operand["spec"]["format"] == "e4m3"
    assert {"underflow", "saturation", "bits_per_element"} <= operand.keys()
    assert product.keys() == {"layer", "name", "recipe", "product", "operand", "sqnr_db"}


def test_a_checkpoint_knows_its_run(cli: Callable, words: list[str], tmp_path: Path) -> None:
    cli("train", words[1], "--out", str(tmp_path), "--set", "train.steps=1")
    (path,) = (tmp_path / "checkpoints").iterdir()
    data = json.loads(cli("errors", "--checkpoint", str(path), "--recipes", "mxfp8", "--json").out)
    assert (data["model"], data["checkpoint"]) == ("test_layer_errors:digits_mlp", str(path))
    config = tmp_path / "config.toml"
    named = cli("errors", str(config), "--checkpoint", str(path), "--recipes", "mxfp8", "--json")
    assert json.loads(named.out) == data
    fresh = json.loads(cli("errors", str(config), "--recipes", "mxfp8", "--json").out)
    assert fresh["errors"] != data["errors"]


def test_detail_of_one_layer(cli: Callable, words: list[str]) -> None:
    out = cli(*words, "--layer", "3").out
    rows = [line.split() for line in out.splitlines()]
    assert ["nvfp4", "grad_weight", "a"] in [row[:3] for row in rows]
    assert ["mxfp8", "output", "the", "product"] in [row[:4] for row in rows]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--layer", "9"], "layer: got '9'; must be one of 1, 3"),
        (["--recipes", "fp9"], "recipe: got 'fp9'; unknown"),
        (["--checkpoint", "nowhere"], "checkpoint: got nowhere; it has no manifest.json"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    cli: Callable, words: list[str], more: list[str], line: str
) -> None:
    code, out, err = cli(*words, *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"mixprec: {line}")
