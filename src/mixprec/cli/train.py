"""`mixprec train`: a training run from a TOML file."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mixprec.cli.options import Base, Device, Json, Settings
from mixprec.cli.output import print_json, print_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A TOML file.", metavar="CONFIG")],
    settings: Settings = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Run folder; runs/ and the file's name by default.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="A checkpoint, or auto: the run's newest whole one.", show_default=False),
    ] = None,
    device: Device = None,
    base: Base = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="One step, one evaluation batch; nothing is written.")
    ] = False,
    save_model: Annotated[
        bool, typer.Option("--save-model", help="Leave the weights in model.pt.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a model.

    The run folder holds the resolved configuration, metrics.jsonl, result.json and checkpoints.
    Exit code 3: a loss or gradient was not finite. Exit code 75: stopped by SIGTERM, SIGINT or
    SIGUSR1, with a checkpoint saved; --resume auto goes on.
    """
    from rich.console import Console

    from mixprec.train.config import load
    from mixprec.train.distributed import has_other_ranks, is_first_process
    from mixprec.train.faults import EXIT_CODES, NonFiniteError
    from mixprec.train.loop import Preempted, run

    context.obj["is_rank"] = has_other_ranks()
    console = Console(stderr=as_json)
    shortcuts = [
        *([f"train.device={device}"] if device is not None else []),
        *([f"base={base}"] if base is not None else []),
        *(["train.dry_run=true"] if dry_run else []),
        *(["train.save_model=true"] if save_model else []),
    ]
    resolved = load(config, [*(settings or []), *shortcuts])
    folder = Path("runs") / config.stem if out is None else out
    try:
        with _asked_to_stop() as asked_to_stop:
            result = _recorded(run)(
                resolved,
                out=folder,
                resume=resume,
                stop=asked_to_stop.is_set,
                console=console,
                show=lambda report: _show(report.table(), console),
            )
    except (NonFiniteError, Preempted) as error:
        typer.echo(f"mixprec: {error}", err=True)
        outcome = "preempted" if isinstance(error, Preempted) else "nonfinite"
        raise typer.Exit(EXIT_CODES[outcome]) from error
    if not is_first_process():
        return
    if as_json:
        print_json(result)
    elif not resolved.train.dry_run:
        console.print(f"results in {folder}", markup=False, highlight=False, soft_wrap=True)


def _show(table: Table, console: Console) -> None:
    print_table(
        [str(column.header) for column in table.columns],
        list(zip(*(map(str, column.cells) for column in table.columns), strict=True)),
        title=str(table.title),
        out=console,
    )


def _recorded(train: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves an error where torchrun looks for it, so that its summary has more than a code."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return train
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(train)


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """An event that a signal sets for as long as the block runs; only a main thread can listen.

    After a first SIGINT (Ctrl-C) the next one ends the program at once.
    """
    from mixprec.train.faults import STOP_SIGNALS

    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def note(number: int, _: object) -> None:
        asked.set()
        again = ""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            again = "; once more to stop at once"
        # not print, which may be at work where the signal arrives
        name = signal.Signals(number).name
        os.write(2, f"mixprec: {name}: saving a checkpoint after this step{again}\n".encode())

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
