"""What emulated FP64 products cost and keep, beside native ones, longdouble and FLINT.

    python benchmarks/fp64.py                     n = 256, 512, 1024, a table each
    python benchmarks/fp64.py --check             the bars; exits with 1 when one is missed
    python benchmarks/fp64.py --json              one JSON document
    python benchmarks/fp64.py --device cuda       n = 4096, 8192, and cuBLAS's own emulation

All contenders run in one process, in turns; a figure is the median over the rounds of the ratio to
torch.mm in float64 within a round. A grade is the largest |C - A B| / (2^-53 |A||B|) of elements in
8 rows and 64 columns, against exact integers; below 1 is better than one rounding of |A||B|.
numpy's longdouble (whose products are loops, linear in the rows) is timed on 1/8 of the rows, and
FLINT's balls of 106 bits (python-flint) are left out where it is not installed; both in one round.
cuBLAS's emulation runs in a process of its own, since the variables that switch it on hold for a
whole one. Matrices are (u - 1/2) exp(phi z), u uniform, z normal, and standard normal for phi = -1.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from processes import best_of
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mixprec import fp64
from mixprec.cublas import DOUBLE, Emulation
from mixprec.measure import interleaved

# at most so many times native, by contender and size
BARS = {("double_double", 512): 20.0, ("auto", 512): 14.0, ("auto", 1024): 14.0}
# at least so many times faster than longdouble
LONGDOUBLE_BAR = {("double_double", 512): 5.0}
NATIVE, LONGDOUBLE, CUBLAS = "native", "numpy longdouble", "cuBLAS, emulated"
FLINT = "FLINT arb 106 bits"
SIZES = {"cpu": "256,512,1024", "cuda": "4096,8192"}
LONGDOUBLE_PART = 8
SLOW_ROUNDS = 1
FLINT_BITS = 106
ROWS, COLUMNS = 8, 64


@dataclass(frozen=True, slots=True)
class Contender:
    """A product: what is timed, the share of the rows that is, and (value, rest) of an element."""

    call: Callable[[], Any]
    element: Callable[[Any, int, int], Fraction]
    part: int = 1
    options: Mapping[str, Any] | None = None


def _matrix(n: int, phi: float, seed: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, n, generator=generator, dtype=torch.float64)
    if phi != -1:
        z = (torch.rand(n, n, generator=generator, dtype=torch.float64) - 0.5) * torch.exp(phi * z)
    return z.to(device)


class Reference:
    """A B and |A||B| at sampled elements, from exact integers."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        n = a.shape[0]
        # within the rows that longdouble computes
        self.rows = [i * (n // LONGDOUBLE_PART) // ROWS for i in range(min(ROWS, n // 8))]
        self.columns = [j * n // COLUMNS for j in range(COLUMNS)]
        left, shift_a = _integers(a[self.rows])
        right, shift_b = _integers(b[:, self.columns].T)
        unit = 1 << shift_a + shift_b
        self.exact, self.magnitude = {}, {}
        for i, row in zip(self.rows, left, strict=True):
            for j, column in zip(self.columns, right, strict=True):
                products = [x * y for x, y in zip(row, column, strict=True)]
                self.exact[i, j] = Fraction(sum(products), unit)
                self.magnitude[i, j] = Fraction(sum(map(abs, products)), unit)

    def grade(self, element: Callable[[int, int], Fraction]) -> float:
        """The largest error over 2^-53 |A||B|."""
        return max(
            float(abs(element(*place) - exact) / self.magnitude[place] * 2**53)
            for place, exact in self.exact.items()
        )


def _integers(x: Tensor) -> tuple[list[list[int]], int]:
    """Rows of x as integers in units of 2^-shift, and the shift."""
    ratios = [[value.as_integer_ratio() for value in row] for row in x.tolist()]
    shift = max(denominator.bit_length() - 1 for row in ratios for _, denominator in row)
    return [[p * ((1 << shift) // q) for p, q in row] for row in ratios], shift


def _of_tensor(result: Any, i: int, j: int) -> Fraction:
    parts = result if isinstance(result, tuple) else (result,)
    return sum((Fraction(float(part[i, j])) for part in parts), Fraction(0))


def _own(a: Tensor, b: Tensor, engines: list[str]) -> dict[str, Contender]:
    rows: dict[str, dict[str, Any]] = {
        "auto": {},
        "auto slices": {"scheme": "slices"},
        "auto residues": {"scheme": "residues"},
    }
    for engine in engines:
        for bits in (55, 79):
            rows[f"{bits} bits {engine}"] = {"bits": bits, "engine": engine}
    rows |= {output: {"output": output} for output in ("double_double", "nearest")}
    return {
        name: Contender(functools.partial(fp64.matmul, a, b, **options), _of_tensor, 1, options)
        for name, options in rows.items()
    }


def _longdouble(a: Tensor, b: Tensor) -> dict[str, Contender]:
    left, right = (x.numpy().astype(np.longdouble) for x in (a, b))
    left = left[: left.shape[0] // LONGDOUBLE_PART]

    def element(result: Any, i: int, j: int) -> Fraction:
        high = float(result[i, j])
        return Fraction(high) + Fraction(float(result[i, j] - np.longdouble(high)))

    return {LONGDOUBLE: Contender(lambda: left @ right, element, LONGDOUBLE_PART)}


def _flint(a: Tensor, b: Tensor) -> dict[str, Contender]:
    try:
        flint = importlib.import_module("flint")
    except ImportError:
        return {}
    flint.ctx.prec = FLINT_BITS
    left, right = (flint.arb_mat(*x.shape, x.flatten().tolist()) for x in (a, b))

    def element(result: Any, i: int, j: int) -> Fraction:
        mantissa, exponent = result[i, j].mid().man_exp()
        return int(mantissa) * Fraction(2) ** int(exponent)

    return {FLINT: Contender(lambda: left * right, element)}


def _has_vnni() -> bool:
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())


def default_engines(device: str) -> list[str]:
    """float64; int8 too where the CPU multiplies it in AVX-512 VNNI, and alone on a GPU."""
    if device != "cpu":
        return ["int8"]
    return ["float64", *(["int8"] if _has_vnni() else [])]


def measure(n: int, options: argparse.Namespace) -> dict[str, Any]:
    """Ratios to native and grades of every contender at one size, in this process."""
    device, engines, phi = options.device, options.engines, options.phi
    # one freed block of this size lifts glibc's thresholds: later blocks stay mapped, for everyone
    torch.empty(31 * 2**18).sum()
    a, b = _matrix(n, phi, 0, device), _matrix(n, phi, 1, device)
    native = {NATIVE: Contender(lambda: torch.mm(a, b), _of_tensor)}
    # no engines: the child that has cuBLAS's emulation in place of native products
    fast = native | (_own(a, b, engines) if engines else {})
    slow = (_longdouble(a, b) | _flint(a, b)) if device == "cpu" and engines else {}
    if options.only:
        fast, slow = (
            {name: one for name, one in group.items() if name in {NATIVE, *options.only}}
            for group in (fast, slow)
        )
    timing = interleaved({name: one.call for name, one in fast.items()}, options.rounds)
    ratios, seconds = dict(timing.ratios), dict(timing.seconds)
    if slow:
        calls = {name: one.call for name, one in (native | slow).items()}
        slow_timing = interleaved(calls, SLOW_ROUNDS)
        for name, one in slow.items():
            seconds[name] = slow_timing.seconds[name] * one.part
            # one round of native beside a loop of seconds would decide: the median does
            ratios[name] = seconds[name] / seconds[NATIVE]
    reference = Reference(a, b)
    contenders = {}
    for name, one in (fast | slow).items():
        result = one.call()
        entry = {"ratio": ratios[name], "milliseconds": 1e3 * seconds[name]}
        entry["grade"] = reference.grade(functools.partial(one.element, result))
        contenders[name] = entry | _report(a, b, one)
        if name == NATIVE:
            digest = hashlib.sha256(result.cpu().numpy().tobytes()).hexdigest()
    return {"n": n, "phi": phi, "device": device, "contenders": contenders, "digest": digest}


def _report(a: Tensor, b: Tensor, one: Contender) -> dict[str, Any]:
    """What the library says about its own product; nothing about others."""
    if one.options is None:
        return {}
    with fp64.record() as found:
        one.call()
    report = found[0]
    kept = ("scheme", "engine", "bits", "parts", "products", "native_rows", "native_columns")
    return {name: getattr(report, name) for name in kept}


def with_cublas(result: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The result with a row of cuBLAS's own emulation, or a note that it did nothing here."""
    changes = Emulation(fp64="auto", strategy="eager").environment()
    environment = dict(os.environ)
    for name, value in changes.items():
        environment.pop(name, None)
        environment |= {} if value is None else {name: value}
    command = [sys.executable, __file__, "--json", "--native-only", "--device", options.device]
    command += ["--sizes", str(result["n"]), "--rounds", str(options.rounds)]
    command += ["--phi", str(options.phi)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    child = json.loads(run.stdout)["results"][0]
    if child["digest"] == result["digest"]:
        return result | {"note": "cuBLAS: with its variables set, the same bits as native"}
    entry = child["contenders"][NATIVE]
    native = result["contenders"][NATIVE]["milliseconds"]
    entry["ratio"] = entry["milliseconds"] / native
    return result | {"contenders": result["contenders"] | {CUBLAS: entry}}


def arguments(n: int, options: argparse.Namespace) -> list[str]:
    """What a fresh process is given to measure one size."""
    return [
        *("--sizes", str(n), "--phi", str(options.phi), "--rounds", str(options.rounds)),
        *("--engines", ",".join(options.engines), "--only", ",".join(options.only)),
        *("--device", str(options.device)),
    ]


def check(results: list[dict[str, Any]]) -> list[str]:
    """The bars that were missed, a line each."""
    missed = []
    for result in results:
        contenders, n = result["contenders"], result["n"]
        for (name, size), bar in BARS.items():
            ratio = contenders[name]["ratio"]
            if size == n and ratio > bar:
                missed.append(f"{name} at {n}: {ratio:.1f} times native, bar {bar:g}")
        for (name, size), bar in LONGDOUBLE_BAR.items():
            faster = contenders[LONGDOUBLE]["ratio"] / contenders[name]["ratio"]
            if size == n and faster < bar:
                missed.append(f"{name} at {n}: {faster:.1f} times longdouble's speed, bar {bar:g}")
        # more than the 2^-53 |C| + 2^-54 |A||B| that is promised
        grade = contenders["auto"]["grade"]
        if grade > max(1.0, contenders[NATIVE]["grade"]):
            missed.append(f"auto at {n}: grade {grade:.2f}")
    return missed


def show(result: dict[str, Any], console: Console) -> None:
    """One table of ratios and grades."""
    where = f"{result['device']}, {torch.get_num_threads()} threads"
    table = Table(title=f"n = {result['n']}, phi = {result['phi']:g}, {where}")
    table.add_column("contender")
    for column in ("x native", "ms", "grade", "scheme", "parts", "bits", "products"):
        table.add_column(column, justify="right")
    for name, entry in result["contenders"].items():
        figures = (f"{entry['ratio']:.2f}", f"{entry['milliseconds']:.2f}", f"{entry['grade']:.2g}")
        said = [str(entry.get(key, "")) for key in ("scheme", "parts", "bits", "products")]
        table.add_row(name, *figures, *said)
    console.print(table)
    if result["device"] == "cpu" and importlib.util.find_spec("flint") is None:
        console.print("FLINT: not installed; pip install python-flint")
    if "note" in result:
        console.print(result["note"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=SIZES)
    parser.add_argument("--sizes", help="n,n,..; 256,512,1024 on a CPU, 4096,8192 on a GPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--phi", type=float, default=-1, help="spread of exponents; -1 is normal")
    parser.add_argument("--engines", help="float64 on a CPU, and int8 where it has AVX-512 VNNI")
    parser.add_argument("--only", default="", help="contenders by name; native is always there")
    parser.add_argument("--processes", type=int, default=0, help="fresh processes; 0 is this one")
    parser.add_argument("--check", action="store_true", help="those with a bar, three processes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--native-only", action="store_true", help="torch.mm alone")
    options = parser.parse_args()
    default = "512,1024" if options.check else SIZES[options.device]
    options.sizes = [int(size) for size in (options.sizes or default).split(",")]
    named = options.engines.split(",") if options.engines else default_engines(options.device)
    options.engines = [] if options.native_only else named
    options.only = [name for name in options.only.split(",") if name]
    if options.check:
        options.only = [*dict.fromkeys(name for name, _ in BARS), LONGDOUBLE]
    options.processes = options.processes or (3 if options.check else 0)
    return options


def main() -> int:
    options = _options()
    if not options.native_only:
        # native is native, whatever the environment says
        os.environ[DOUBLE] = "0"
    results = []
    for n in options.sizes:
        if options.processes:
            results.append(best_of(options.processes, __file__, arguments(n, options)))
            continue
        one = measure(n, options)
        is_complete = options.device == "cpu" or options.native_only
        results.append(one if is_complete else with_cublas(one, options))
    missed = check(results) if options.check else []
    versions = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    if options.device == "cuda":
        versions |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    if options.json:
        print(json.dumps({"results": results, "missed": missed, "versions": versions}))
        return 1 if missed else 0
    console = Console()
    for result in results:
        show(result, console)
    for line in missed:
        console.print(f"missed: {line}", style="bold red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
