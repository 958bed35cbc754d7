"""One GPU in at most eight minutes: is every native product right, and what do recipes gain on it?

    python benchmarks/gpu.py                        writes benchmarks/results/gpu.json and gpu.md
    python benchmarks/gpu.py --minutes 4 --out DIR
    python benchmarks/gpu.py --dry-run              the same code on a CPU, tiny, under a minute
    python benchmarks/gpu.py --only correctness,steps

Needs torch, this package and one CUDA device. Sections, the most important first: correctness of
every native product against the emulated definition, a table of single products, training steps of
vision transformers, FP64 from small integers beside native, and the training steps compiled. Each
runs in a process of its own with a share of the time that is left, so that a failure or a hang of
one does not lose the others; what no longer fits is dropped, the later and larger cases first, and
listed. Files are written after each section. Exits with 1 if a product is wrong or a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_report import markdown, with_speedups

# section -> the share of the time left that it may take
SHARES = {"correctness": 0.4, "products": 0.3, "steps": 0.4, "fp64": 0.25, "compiled steps": 1.0}
RESULTS = Path(__file__).parent / "results"
GRACE_SECONDS = 5.0
Rows = Iterable[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """One case of a section: its name, the seconds it takes on a Hopper GPU, and its rows."""

    name: str
    seconds: float
    run: Callable[[], Rows]


def run_tasks(tasks: list[Task], seconds: float, write: Callable[[dict[str, Any]], None]) -> None:
    """Run what fits into the seconds, in order; every row, failure and omission is written at once.

    A case is dropped if its expected time, corrected by how long the earlier ones took, is more
    than what is left; later ones that fit still run.
    """
    from mixprec.train.log import ProgressLines

    started, pace = time.monotonic(), 1.0
    with ProgressLines(len(tasks)) as progress:
        for done, task in enumerate(tasks):
            begun = time.monotonic()
            left = seconds - (begun - started)
            if pace * task.seconds > left:
                why = f"expected {pace * task.seconds:.0f} s, {max(left, 0):.0f} s were left"
                write({"dropped": {"case": task.name, "why": why}})
                continue
            progress.status(done, f"[{begun - started:5.1f} s] {task.name}")
            try:
                for row in task.run():
                    write({"row": row})
            except Exception as error:
                line = f"{type(error).__name__}: {error}"
                trace = traceback.format_exc(limit=-8)
                write({"error": {"case": task.name, "error": line, "trace": trace}})
            pace = max(1.0, (time.monotonic() - begun) / task.seconds)


def tasks_of(section: str, device: Any, is_dry: bool) -> list[Task]:
    """The cases of a section, the most important first."""
    import gpu_fp64
    import gpu_products

    if section == "correctness":
        names = gpu_products.quantising()
        return [
            Task(name, 4.0, lambda name=name: gpu_products.correctness(name, device))
            for name in names
        ]
    if section == "products":
        sizes = {48: 1.0, 64: 1.0} if is_dry else {4096: 5.0, 8192: 12.0, 2048: 5.0, 1024: 5.0}
        rounds = 1 if is_dry else 7
        return [
            Task(f"n = {n}", cost, lambda n=n: gpu_products.gemm_table(n, device, rounds))
            for n, cost in sizes.items()
        ]
    if section == "fp64":
        sizes = {64: 1.0} if is_dry else {4096: 8.0, 8192: 20.0, 2048: 6.0}
        rounds = 1 if is_dry else 5
        return [
            Task(f"n = {n}", cost, lambda n=n: gpu_fp64.measure(n, device, rounds))
            for n, cost in sizes.items()
        ]
    return step_tasks(device, section == "compiled steps", is_dry)


def step_tasks(device: Any, is_compiled: bool, is_dry: bool) -> list[Task]:
    """The published size first, then its doubled batch, then a smaller model."""
    import gpu_steps

    cases = [("huge", 16), ("huge", 32), ("base", 64), ("base", 128)]
    labels, cost, counts = gpu_steps.LABELS, 12.0, {"warmup": 6, "steps": 20}
    backend = "inductor" if is_compiled else None
    if is_compiled:
        cost = 45.0
    if is_dry:
        cases, cost, counts = [("test", 2), ("test", 4)], 1.0, {"warmup": 1, "steps": 2}
    if is_dry and is_compiled:
        # Dynamo alone: what it traces is what costs time
        cases, labels, backend = cases[:1], labels[:2], "eager"
    return [
        Task(
            f"vit-{preset} batch {batch} {label}",
            cost,
            lambda label=label, preset=preset, batch=batch: [
                gpu_steps.measure(label, preset, batch, device, backend=backend, **counts)
            ],
        )
        for preset, batch in cases
        for label in labels
    ]


def environment(device: Any) -> dict[str, Any]:
    """What ran: the device, and the versions that decide what is native."""
    import torch

    import mixprec
    from mixprec.cublas import library_version

    found = {
        "mixprec": mixprec.__version__,
        "torch": str(torch.__version__),
        "python": sys.version.split()[0],
        "device": "cpu",
    }
    if device.type != "cuda":
        return found
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda": str(torch.version.cuda),
        "cublas": str(library_version()),
    }


def run_section(section: str, seconds: float, lines: Path, is_dry: bool) -> None:
    """In the section's own process: a line of JSON for each thing there is to say."""
    import torch

    from mixprec.cublas import DOUBLE
    from mixprec.train.log import finite

    # native FP64 is native, whatever the environment says
    os.environ[DOUBLE] = "0"
    device = torch.device("cpu") if is_dry else torch.device("cuda", 0)
    if is_dry:
        torch.set_num_threads(1)
    with lines.open("a") as file:

        def write(entry: dict[str, Any]) -> None:
            file.write(json.dumps(finite(entry), allow_nan=False) + "\n")
            file.flush()

        write({"environment": environment(device)})
        run_tasks(tasks_of(section, device, is_dry), seconds, write)


def collect(section: str, seconds: float, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a section in a process of its own and gather what it wrote, however it ended."""
    lines = out / f"{options.name}.{section.replace(' ', '_')}.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--section", section, "--seconds", str(seconds)]
    command += ["--lines", str(lines), *(["--dry-run"] if options.dry_run else [])]
    started = time.monotonic()
    # a session of its own: what compiles for it ends with it
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(seconds + GRACE_SECONDS)
        end = "" if process.returncode == 0 else f"the process ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        end = f"cut off after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = {"rows": [], "dropped": [], "errors": [], "environment": {}}
    for line in lines.read_text().splitlines() if lines.exists() else ():
        entry = json.loads(line)
        found["environment"] = entry.get("environment", found["environment"])
        for key, name in (("row", "rows"), ("dropped", "dropped"), ("error", "errors")):
            found[name] += [entry[key]] if key in entry else []
    lines.unlink(missing_ok=True)
    if end:
        found["errors"].append({"case": section, "error": end, "trace": ""})
    return found | {"seconds": round(time.monotonic() - started, 1)}


def is_right(result: dict[str, Any]) -> bool:
    """Whether nothing failed: no product is wrong, and every case that ran ended."""
    sections = result["sections"].values()
    wrong = [row for found in sections for row in found["rows"] if row.get("status") == "fail"]
    return not wrong and not any(found["errors"] for found in sections)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All sections; both files are written after each."""
    deadline = time.monotonic() + 60 * options.minutes
    result: dict[str, Any] = {"environment": {}, "minutes": options.minutes, "sections": {}}
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for section in options.only:
        # starting a process and ending it is not its work
        left = deadline - time.monotonic() - 2 * GRACE_SECONDS
        found = collect(section, max(left * SHARES[section], 1.0), out, options)
        result["environment"] = found.pop("environment") or result["environment"]
        if section.endswith("steps"):
            known = [row for done in result["sections"].values() for row in done["rows"]]
            found["rows"] = with_speedups(found["rows"], known)
        result["sections"][section] = found
        (out / f"{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / f"{options.name}.md").write_text(markdown(result))
    return result


def has_gpu() -> bool:
    """Whether torch finds a CUDA device; AMD's are none."""
    import torch

    return torch.version.hip is None and torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--only", default=",".join(SHARES), help="sections, by commas")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases on a CPU")
    for name in ("section", "seconds", "lines"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        run_section(options.section, float(options.seconds), Path(options.lines), options.dry_run)
        return 0
    options.only = options.only.split(",")
    unknown = [name for name in options.only if name not in SHARES]
    if unknown:
        parser.error(f"only: got {', '.join(unknown)}; must be of {', '.join(SHARES)}")
    if not (options.dry_run or has_gpu()):
        parser.error("device: got no CUDA device; this measures one; use --dry-run on a CPU")
    options.name = "gpu_dry_run" if options.dry_run else "gpu"
    result = measure(options)
    print(markdown(result))
    return 0 if is_right(result) else 1


if __name__ == "__main__":
    sys.exit(main())
