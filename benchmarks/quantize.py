"""What quantising costs, in copies of the tensor, beside torchao, gfloat and ml_dtypes.

    python benchmarks/quantize.py                 4096x4096 float32, eager and compiled, a table
    python benchmarks/quantize.py --check         the bars; exits with 1 when one is missed
    python benchmarks/quantize.py --json          one JSON document

A copy is `dst.copy_(src)` into a tensor that exists. All contenders run in one process, in turns; a
figure is the median over the rounds of the ratio to the copy within a round. `codes` ends at codes
and scales, `round trip` at float32 again. Errors are signal to quantisation noise ratios of the
round trip on standard normal numbers. gfloat and ml_dtypes work on numpy arrays and have elements
without block scales (gfloat's blocks are loops in Python), so that theirs are figures of the cast
alone; gfloat is timed on 1/64 of the rows.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mixprec
from mixprec.measure import interleaved, sqnr_db
from mixprec.quantization import QuantSpec

SPECS = {
    "mx e4m3": mixprec.RECIPES["mxfp8"].output.a,
    "nvfp4": mixprec.RECIPES["nvfp4"].output.a,
    "nvfp4 16x16": mixprec.RECIPES["nvfp4"].output.b,
    "nvfp4 stochastic": mixprec.RECIPES["nvfp4"].grad_input.a,
    "row e4m3": mixprec.RECIPES["fp8_rowwise"].output.a,
    "128x128 e4m3": mixprec.RECIPES["fp8_blockwise"].output.b,
    "mx e2m1": mixprec.RECIPES["mxfp4"].output.a,
    "mx e3m2": mixprec.RECIPES["mxfp6_e3m2"].output.a,
    "mx e2m3": mixprec.RECIPES["mxfp6_e2m3"].output.a,
}
BARS = {
    ("mx e4m3", "eager"): 4.0,
    ("mx e4m3", "compiled"): 2.5,
    ("nvfp4", "eager"): 12.0,
    ("nvfp4", "compiled"): 5.0,
}
MODES = ("eager", "compiled")
COPY = "copy"
SLOW_PART = 64
SLOW_ROUNDS = 3
Call = Callable[[], object]
Trip = Callable[[], Tensor]
Contender = tuple[Call, Trip]


def _own(x: Tensor, spec: QuantSpec, mode: str) -> Contender:
    noise = mixprec.Noise(seed=0) if spec.is_stochastic else None

    # tensors in, tensors out: what a compiled graph hands over
    def codes(values: Tensor) -> tuple[Tensor, ...]:
        q = mixprec.quantize(values, spec, noise=noise)
        return tuple(kept for kept in (q.codes, q.scale, q.tensor_amax) if kept is not None)

    def trip(values: Tensor) -> Tensor:
        return mixprec.quantize(values, spec, noise=noise).dequantize()

    if mode == "compiled":
        codes, trip = (torch.compile(f, fullgraph=True, dynamic=False) for f in (codes, trip))
    return lambda: codes(x), lambda: trip(x)


def _torchao(x: Tensor, mode: str) -> dict[str, Contender]:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize

    def mx(values: Tensor) -> tuple[Tensor, Tensor]:
        return to_mx(values, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

    def mx_trip(values: Tensor) -> Tensor:
        scale, data = mx(values)
        return to_dtype(data, scale, torch.float8_e4m3fn, 32, torch.float32)

    def nvfp4(values: Tensor) -> tuple[Tensor, Tensor]:
        return nvfp4_quantize(values, 16, values.abs().max() / 2688)

    def nvfp4_trip(values: Tensor) -> Tensor:
        whole = values.abs().max() / 2688
        return NVFP4Tensor.to_nvfp4(values, per_tensor_scale=whole).dequantize(torch.float32)

    found = {}
    for name, calls in {"mx e4m3": (mx, mx_trip), "nvfp4": (nvfp4, nvfp4_trip)}.items():
        if mode == "compiled":
            calls = tuple(torch.compile(f, fullgraph=True, dynamic=False) for f in calls)
        found[name] = tuple(lambda f=f: f(x) for f in calls)
    return found


def _ml_dtypes(x: Tensor) -> dict[str, Contender]:
    array = x.numpy()

    def cast(kind: type) -> Contender:
        return (
            lambda: array.astype(kind),
            lambda: torch.from_numpy(array.astype(kind).astype(np.float32)),
        )

    return {
        "e4m3 cast": cast(ml_dtypes.float8_e4m3fn),
        "e2m1 cast": cast(ml_dtypes.float4_e2m1fn),
    }


def _gfloat(x: Tensor) -> dict[str, Contender]:
    from gfloat import decode_ndarray, encode_ndarray, round_ndarray
    from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3

    array = x.numpy().astype(np.float64)

    def cast(fmt: Any) -> Contender:
        def codes() -> np.ndarray:
            return encode_ndarray(fmt, round_ndarray(fmt, array, sat=True))

        return codes, lambda: torch.from_numpy(decode_ndarray(fmt, codes()).astype(np.float32))

    return {"e4m3 cast": cast(format_info_ocp_e4m3), "e2m1 cast": cast(format_info_ocp_e2m1)}


def _entries(x: Tensor, mode: str, has_peers: bool) -> dict[tuple[str, str, str], Contender]:
    """Contenders by library, what they make, and mode."""
    found = {("mixprec", name, mode): _own(x, spec, mode) for name, spec in SPECS.items()}
    if has_peers:
        found |= {("torchao", name, mode): calls for name, calls in _torchao(x, mode).items()}
    if has_peers and mode == MODES[0]:
        found |= {("ml_dtypes", name, mode): calls for name, calls in _ml_dtypes(x).items()}
    return found


def _timed(
    entries: dict[tuple[str, str, str], Contender], x: Tensor, rounds: int
) -> list[dict[str, Any]]:
    copy = torch.empty_like(x)
    calls: dict[str, Call] = {COPY: lambda: copy.copy_(x)}
    for key, (codes, trip) in entries.items():
        calls["/".join((*key, "codes"))] = codes
        calls["/".join((*key, "trip"))] = trip
    errors = {key: sqnr_db(x, trip().reshape(x.shape)) for key, (_, trip) in entries.items()}
    ratios = interleaved(calls, rounds).ratios
    return [
        {
            "library": key[0],
            "what": key[1],
            "mode": key[2],
            "codes": ratios["/".join((*key, "codes"))],
            "round_trip": ratios["/".join((*key, "trip"))],
            "sqnr_db": errors[key],
        }
        for key in entries
    ]


def measure(rows: int, columns: int, rounds: int, modes: list[str], has_peers: bool) -> Any:
    """Copies and errors of every contender, in this process."""
    # one freed block of this size lifts glibc's thresholds: later blocks stay mapped, for everyone
    torch.empty(31 * 2**18).sum()
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    results = []
    for mode in modes:
        results += _timed(_entries(x, mode, has_peers), x, rounds)
    if has_peers and MODES[0] in modes:
        part = x[: max(rows // SLOW_PART, 1)].clone()
        slow = {("gfloat", name, MODES[0]): calls for name, calls in _gfloat(part).items()}
        results += _timed(slow, part, SLOW_ROUNDS)
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    return {
        "shape": [rows, columns],
        "threads": threads,
        "capability": capability,
        "results": results,
    }


def check(results: list[dict[str, Any]]) -> list[str]:
    """The bars that were missed, a line each."""
    missed = []
    for entry in results:
        bar = BARS.get((entry["what"], entry["mode"]))
        if entry["library"] == "mixprec" and bar is not None and entry["codes"] > bar:
            missed.append(
                f"{entry['what']} {entry['mode']}: {entry['codes']:.2f} copies, bar {bar}"
            )
    return missed


def show(measured: dict[str, Any], console: Console) -> None:
    """One table of copies and errors."""
    rows, columns = measured["shape"]
    table = Table(
        title=f"copies of {rows}x{columns} float32, {measured['threads']} threads, "
        f"{measured['capability']}"
    )
    for column in ("library", "what", "mode"):
        table.add_column(column)
    for column in ("codes", "round trip", "SQNR dB"):
        table.add_column(column, justify="right")
    for entry in measured["results"]:
        figures = (f"{entry['codes']:.2f}", f"{entry['round_trip']:.2f}", f"{entry['sqnr_db']:.1f}")
        table.add_row(entry["library"], entry["what"], entry["mode"], *figures)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", default="4096,4096", help="rows,columns")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--mode", default="both", choices=("both", *MODES))
    parser.add_argument("--only", nargs="*", choices=SPECS, help="these, without the others")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--check", action="store_true", help="the bars alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    only = [name for name, _ in BARS] if options.check else options.only
    for name in set(SPECS) - set(only or SPECS):
        del SPECS[name]
    rows, columns = (int(size) for size in options.size.split(","))
    modes = list(MODES) if options.mode == "both" else [options.mode]
    has_peers = not (options.no_peers or options.check)
    measured = measure(rows, columns, options.rounds, modes, has_peers)
    missed = check(measured["results"]) if options.check else []
    if options.json:
        print(json.dumps({**measured, "missed": missed}))
    else:
        console = Console()
        show(measured, console)
        for line in missed:
            console.print(f"missed: {line}", style="bold red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
