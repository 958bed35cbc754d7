"""Configurations and command lines as nobody would write them: exit code 0 or 2, no traceback."""

from __future__ import annotations

import dataclasses
import io
import random
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import typer.main
from train.conftest import write_idx_folder

from mixprec.cli.main import app, main
from mixprec.recipes import RECIPES
from mixprec.train.config import load
from mixprec.train.config_fields import OPTIMIZERS, Config
from mixprec.train.data import DATASETS
from mixprec.train.models import MODELS
from mixprec.train.toml_text import ConfigError

FILES, LINES, DRY_RUNS = 6000, 3500, 500
CHUNKS = 10
NAMES = [*MODELS, *DATASETS, *OPTIMIZERS, *RECIPES, "O1", "auto", "cpu", "cuda:7", "emulated"]
WORDS = [*NAMES, "", " ", "ä😀", "\\u0000", "\\n", "../..", "a.b:c", "-1", "x" * 5000, "%s{0}", "~"]
NUMBERS = ["0", "1", "2", "8", "-1", "1_000", "0x10", f"1{'0' * 40}", f"-1{'0' * 400}"]
NUMBERS += ["0.0", "0.5", "1.0", "-0.0", "1e-300", "1e308", "1e999", "nan", "-inf", "inf"]
OTHERS = ["true", "false", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "[]", "{}", "[[]]"]
KEYS = ["x", '""', '"ä"', "lr", "preset", "width", "format", "output", "a", "exponent", "block"]
SECTIONS = {
    field.name: [inner.name for inner in dataclasses.fields(getattr(Config(), field.name))]
    for field in dataclasses.fields(Config)
    if dataclasses.is_dataclass(getattr(Config(), field.name))
}
TOP = [field.name for field in dataclasses.fields(Config) if field.name not in SECTIONS]
SHAPE = {"size": 28, "patch": 7, "channels": 1, "width": 16, "depth": 1, "heads": 2}
SMALL = ["model=vit", "model_options.classes=10", "data.name=mnist", "data.batch_size=8"]
SMALL += [f"model_options.{key}={number}" for key, number in SHAPE.items()]
LIKELY = ["0", "1", "2", "3", "8", "0.5", "1.0", "-1", "1e-3", "true", "false", "nan", "inf", "[]"]
LIKELY += ["{}", '"x"', '"bf16"', '["*"]', '["fc*"]', "[0.9, 0.99]"]
RECIPE_KEYS = ["base", "loss_scale", "parameters", "update", "attention", "output", "description"]
OPTIMIZER_KEYS = ["betas", "eps", "weight_decay", "momentum", "fused", "foreach", "amsgrad", "rho"]
OPTIONS = ["--set", "--json", "--device", "--base", "--out", "--resume", "--recipes", "--steps"]
OPTIONS += ["--layer", "--checkpoint", "--target", "--memory", "--gpus", "--batch", "--cast"]
OPTIONS += ["--help", "--versio", "--debug", "-x", "--", "--torch", "--save-model", "--seeds"]
LIGHT = ["formats", "recipes", "report", "nothing", ""]
HEAVY = ["train", "plan", "explain", "errors", "compare", "bench"]


def value(draw: random.Random, depth: int = 0) -> str:
    """A value as TOML writes it, of any kind."""
    kind = draw.random()
    if kind < 0.35 or depth > 4:
        return draw.choice(NUMBERS)
    if kind < 0.7:
        return f'"{draw.choice(WORDS)}"'
    if kind < 0.8:
        return draw.choice(OTHERS)
    if kind < 0.9:
        return "[" + ", ".join(value(draw, depth + 1) for _ in range(draw.randrange(4))) + "]"
    if kind < 0.91:
        deep = draw.choice([33, 300])
        return "[" * deep + "]" * deep
    keys = draw.sample(KEYS, draw.randrange(4))
    return "{" + ", ".join(f"{key} = {value(draw, depth + 1)}" for key in keys) + "}"


def setting(draw: random.Random) -> tuple[str, str]:
    """A key, mostly one that there is, and a value."""
    section = draw.choice([*SECTIONS, "", "nowhere"])
    keys = TOP if not section else [*SECTIONS.get(section, []), "x", "ä", "options.x"]
    key = draw.choice([*keys, "epoch", "a.b.c", "x." * 40 + "x"])
    return f"{section}.{key}".lstrip("."), value(draw)


def document(draw: random.Random) -> bytes:
    """A TOML file, or what is left of one."""
    lines = {}
    for _ in range(draw.randrange(6)):
        key, text = setting(draw)
        lines[key] = text
    content = "\n".join(f"{key} = {text}" for key, text in lines.items()).encode()
    return damaged(content, draw) if draw.random() < 0.3 else content


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut off or put in."""
    found = bytearray(content)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(found) + 1)
        kind = draw.randrange(3)
        if kind == 0:
            found[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del found[place : place + draw.choice([1, 10, 1000])]
        else:
            found[place:place] = draw.randbytes(draw.randrange(5))
    return bytes(found)


def command(draw: random.Random, absent: str) -> list[str]:
    """A command line that ends soon: what may take long is given no configuration that is there."""
    verb = draw.choice([*LIGHT, *HEAVY])
    words = [verb] if verb in LIGHT else [verb, draw.choice([absent, "--nothing"])]
    for _ in range(draw.randrange(4)):
        words.append(draw.choice(OPTIONS))
        if draw.random() < 0.8:
            plain = [*WORDS, *NUMBERS, *NAMES, "=".join(setting(draw))]
            words.append(draw.choice(plain))
    return words


def dry_run(draw: random.Random) -> list[str]:
    """A step of a small model, with one or two settings that there are and values that may fit."""
    settings = list(SMALL)
    for _ in range(draw.randrange(1, 3)):
        number, recipe = draw.choice(LIKELY), draw.choice(list(RECIPES))
        section = draw.choice(
            [*SECTIONS, "model_options", "recipe", "variant", "optimizer.options"]
        )
        if section == "recipe":
            settings.append(f"recipe={recipe}")
        elif section == "variant":
            key = draw.choice(RECIPE_KEYS)
            settings.append(f'recipe={{variant_of = "{recipe}", {key} = {number}}}')
        elif section == "model_options":
            settings.append(f"{section}.{draw.choice([*SHAPE, 'classes', 'preset'])}={number}")
        elif section == "optimizer.options":
            settings.append(f"optimizer.name={draw.choice(list(OPTIMIZERS))}")
            settings.append(f"{section}.{draw.choice(OPTIMIZER_KEYS)}={number}")
        else:
            # a compiler takes seconds
            keys = [key for key in SECTIONS[section] if key != "compile"]
            settings.append(f"{section}.{draw.choice(keys)}={number}")
    return [word for setting in settings for word in ("--set", setting)]


def ends(words: list[str]) -> str | None:
    """What is wrong with how a command line ends; None for the exit codes 0 and 2."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
        except SystemExit as exit_:
            code = exit_.code or 0
        except BaseException:
            return traceback.format_exc()
        finally:
            sys.stdout = out
    said = err.getvalue()
    is_told = code == 0 or said.strip()
    return None if code in (0, 2) and is_told and "Traceback" not in said else f"{code}: {said}"


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands are made once, and a run that would begin is refused: its folder is taken."""
    commands = typer.main.get_command(app)
    monkeypatch.setattr(typer.main, "get_command", cache(lambda _: commands))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "small").mkdir(parents=True)
    (tmp_path / "runs" / "small" / "metrics.jsonl").touch()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_quick")
def test_dry_runs(tmp_path: Path) -> None:
    draw, faults = random.Random(77), []
    (tmp_path / "small.toml").touch()
    write_idx_folder(tmp_path)
    for _ in range(DRY_RUNS):
        words = ["train", "small.toml", "--dry-run", *dry_run(draw), "--set", "data.path=."]
        fault = ends(words)
        # infinite learning rates and the like end as they should
        if fault and "not finite" not in fault:
            faults.append((words, fault))
    report(faults)


def report(faults: list[tuple[object, str]]) -> None:
    assert not faults, f"{len(faults)} faults, the first: {faults[0][0]!r}\n{faults[0][1]}"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_configuration_files(tmp_path: Path, chunk: int) -> None:
    draw, file = random.Random(chunk), tmp_path / "small.toml"
    faults = []
    for _ in range(FILES // CHUNKS):
        content = document(draw)
        file.write_bytes(content)
        words = ["train", str(file)]
        for _ in range(draw.randrange(2)):
            words += ["--set", "=".join(setting(draw))]
        if b"dry_run" not in content and (fault := ends(words)):
            faults.append(((content, words), fault))
    report(faults)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_command_lines(chunk: int) -> None:
    draw = random.Random(1000 + chunk)
    lines = [command(draw, "absent.toml") for _ in range(LINES // CHUNKS)]
    report([(line, fault) for line in lines if (fault := ends(line))])


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("deep", [33, 1000, 30_000])
def test_a_configuration_deeper_than_any_is_refused(tmp_path: Path, deep: int) -> None:
    brackets = "[" * deep + "]" * deep
    file = tmp_path / "small.toml"
    file.write_text(f"model_options = {{x = {brackets}}}")
    with pytest.raises(ConfigError, match="deeper than 32 levels; no setting is"):
        load(file)
    assert ends(["train", str(file)]) is None
    file.write_text("")
    for setting_ in (f"x={brackets}", "a." * min(deep, 1000) + "b=1"):
        assert ends(["train", str(file), "--set", setting_]) is None
