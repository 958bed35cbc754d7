"""`mixprec bench`: training steps of a model under recipes; `mixprec bench gemm`: single layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from mixprec.cli.options import Json, Recipes, names
from mixprec.cli.output import (
    MEMORY,
    console,
    megabytes,
    number,
    print_json,
    print_table,
    written_page,
)
from mixprec.train.faults import EXIT_CODES

GIGABYTE = 1e9
CASE = "recipe mode batch"
PROCESS_PEAK = "process_peak_bytes"

Base = Annotated[
    str | None,
    typer.Option(help="fp32, bf16 or fp16, for all recipes.", metavar="TYPE", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu, mps, cuda or cuda:N.")]
Impl = Annotated[str, typer.Option(help="auto, or the implementation of the products.")]
Out = Annotated[
    str | None,
    typer.Option(help="Folder for result.json and bench.html.", metavar="PATH", show_default=False),
]

bench = typer.Typer(rich_markup_mode=None)


@bench.callback(invoke_without_command=True)
def steps(
    context: typer.Context,
    preset: Annotated[
        str, typer.Option(help="mnist-cnn, vit-tiny to vit-huge, gpt-tiny to gpt-base.")
    ] = "vit-tiny",
    recipes: Recipes = None,
    base: Base = None,
    mode: Annotated[
        str | None,
        typer.Option(help="eager, compiled, or both.", metavar="MODE", show_default=False),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Rows of a batch, separated by commas; auto: the largest that fits.",
            metavar="A,B",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of each, the warm-up too.", show_default=False)
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps that are not timed.", show_default=False)
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="torchao, transformer_engine: their rows too.",
            metavar="A,B",
            show_default=False,
        ),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            help="GB of tensors a contender may have on a CPU; 0.8 of what is free by default.",
            metavar="GB",
            show_default=False,
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="turns, or alone: one contender at a time; as memory allows by default.",
            metavar="ORDER",
            show_default=False,
        ),
    ] = None,
    process_peaks: Annotated[
        bool, typer.Option("--process-peaks", help="Each row's peak in a process of its own.")
    ] = False,
    device: Device = "auto",
    impl: Impl = "auto",
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Step time, throughput, memory and loss of recipes, side by side.

    The preset vit-huge repeats the published FP8 experiment; `mixprec bench gemm` measures single
    layers by size. Exit code 1: nothing could run.
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from mixprec.bench import run
    from mixprec.pages.bench import render

    orders = {None: None, "turns": False, "alone": True}
    if order not in orders:
        raise ValueError(f"order: got {order!r}; must be turns or alone")
    result = run(
        preset,
        recipes=names(recipes),
        base=base,
        modes=("eager", "compiled") if mode == "both" else names(mode),
        batches=_batches(batch),
        steps=steps,
        warmup=warmup,
        peers=names(peers) or (),
        device=device,
        impl=impl,
        memory_limit=None if memory_limit is None else int(memory_limit * GIGABYTE),
        alone=orders[order],
        process_peaks=process_peaks,
        seed=seed,
        console=Console(stderr=as_json),
    )
    _finish(result, as_json, out, _show_steps, render)


@bench.command()
def gemm(
    shapes: Annotated[
        str | None,
        typer.Option(
            help="N or MxKxN, separated by commas; 32 to 1024 on a CPU by default.",
            metavar="A,B",
            show_default=False,
        ),
    ] = None,
    recipes: Recipes = None,
    base: Base = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 5,
    device: Device = "auto",
    impl: Impl = "auto",
    seed: Annotated[int, typer.Option(help="Of the operands.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """One linear layer, forward and backward, by size: time, error, and the size that pays."""
    from rich.console import Console

    from mixprec.bench.gemm import RECIPES, run
    from mixprec.pages.bench import render_products

    result = run(
        _shapes(shapes),
        recipes=names(recipes) or RECIPES,
        base=base,
        rounds=rounds,
        device=device,
        impl=impl,
        seed=seed,
        console=Console(stderr=as_json),
    )
    _finish(result, as_json, out, _show_products, render_products)


def _finish(
    result: Mapping[str, Any],
    as_json: bool,
    out: str | None,
    show: Callable[[Mapping[str, Any]], None],
    render: Callable[[Mapping[str, Any]], str],
) -> None:
    """Print, write the folder, and exit with 1 where no row is left."""
    files = _written(result, out, render)
    if as_json:
        print_json(result)
    else:
        show(result)
        for skip in result["skipped"]:
            *case, reason = skip.values()
            said = f"skipped: {' '.join(map(str, case))}: {reason}"
            console().print(said, soft_wrap=True)
        for line in [*result["notes"], *files]:
            console().print(line, soft_wrap=True)
    if not result["rows"]:
        raise typer.Exit(EXIT_CODES["error"])


def _written(
    result: Mapping[str, Any], out: str | None, render: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    """Write the folder, if one is asked for; what there is to say of it."""
    from mixprec.train.log import create_folder, write_json

    if out is None:
        return []
    folder = create_folder(out)
    write_json(folder / "result.json", result)
    if not result["rows"]:
        return [f"result.json is in {folder}"]
    return written_page(folder / "bench.html", lambda: render(result), beside=["result.json"])


def _batches(listed: str | None) -> list[int] | str | None:
    sizes = names(listed)
    if sizes is None or sizes == ["auto"]:
        return listed
    return [_whole("batch", size) for size in sizes]


def _shapes(listed: str | None) -> list[tuple[int, int, int]] | None:
    found = []
    for name in names(listed) or []:
        sizes = [_whole("shapes", part) for part in name.split("x")]
        if len(sizes) not in (1, 3):
            raise ValueError(f"shapes: got {name!r}; a shape is N or MxKxN; write it so")
        m, k, n = sizes if len(sizes) == 3 else sizes * 3
        found.append((m, k, n))
    return found or None


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name}: got {text!r}; must be a whole number of at least 1; use one")
    return int(text)


def _show_steps(result: Mapping[str, Any]) -> None:
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    timed = f"{result['warmup']} of {result['steps']} steps discarded"
    base = f", base {result['base']}" if result["base"] else ""
    title = f"{result['model']}, {result['optimizer']}{base}, {result['order']}, {timed}"
    if not rows:
        console().print(title)
        return
    columns = (
        CASE,
        "step ms",
        "mean ms",
        f"{result['unit']}/s",
        "speed-up",
        "MFU %",
        "loss",
        "s to loss",
    )
    print_table(
        (*columns, "impl"),
        [
            (
                _case(row),
                f"{row['step_ms']:.1f}",
                f"{row['step_ms_mean']:.1f}",
                f"{row['throughput']:.4g}",
                number(row["speedup"], ".2f"),
                number(row["mfu"], ".1f", 100),
                number(row["loss"], ".4f"),
                number(row["seconds_to_loss"], ".3g"),
                row["impl"],
            )
            for row in rows
        ],
        title=title,
        numeric=columns[1:],
    )
    _show_memory(result)


def _show_memory(result: Mapping[str, Any]) -> None:
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    kinds = dict(MEMORY)
    if any(PROCESS_PEAK in row for row in rows):
        kinds[PROCESS_PEAK] = "process peak"
    print_table(
        (CASE, *kinds.values()),
        [(_case(row), *(megabytes(row.get(key)) for key in kinds)) for row in rows],
        title="memory of a step, MB",
        numeric=kinds.values(),
    )
    if result["process_peak_bytes"] is not None:
        peak = megabytes(result["process_peak_bytes"], 0)
        console().print(f"process peak {peak} MB: all rows and libraries together")


def _show_products(result: Mapping[str, Any]) -> None:
    base = f", base {result['base']}" if result["base"] else ""
    columns = ("shape recipe", "ms", "TFLOP/s", "ratio", "SQNR dB y/dx/dw", "impl")
    if result["rows"]:
        print_table(
            columns,
            [
                (
                    f"{row['shape']} {row['recipe']}",
                    f"{row['ms']:.3f}",
                    f"{row['tflops']:.4g}",
                    number(row["ratio"], ".2f"),
                    "/".join(number(value, ".0f") for value in row["sqnr"].values()),
                    row["impl"],
                )
                for row in result["rows"]
            ],
            title=f"a linear layer, forward and backward{base}, {result['rounds']} rounds in turns",
            numeric=columns[1:-1],
        )
    for recipe, where in result["pays"].items():
        console().print(f"{recipe}: pays {where}")


def _case(row: Mapping[str, Any]) -> str:
    return " ".join(str(row[key]) for key in CASE.split())
