"""The command line on ranks of one core, whose gloo threads run when nothing else does."""

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mixprec.cli.main import program

THREADS = 2
"""Those that a group of gloo has for its work."""
start_group = dist.init_process_group


def workers() -> list[int]:
    return [int(each.name) for each in Path("/proc/self/task").iterdir() if is_worker(each)]


def is_worker(task: Path) -> bool:
    try:
        return "gloo_runloop" in (task / "comm").read_text()
    except OSError:
        # it has ended meanwhile
        return False


def start_group_of_late_workers(*args: Any, **options: Any) -> None:
    start_group(*args, **options)
    while len(found := workers()) < THREADS:
        time.sleep(0.01)
    for thread in found:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group = start_group_of_late_workers
    program()
