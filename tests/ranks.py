"""Jobs that run on several ranks of gloo, for tests of what ranks agree on."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# imported once for all ranks of all tests, in a process that does nothing else and so can be forked
PRELOADED = [
    "mixprec.train.loop",
    "numba",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
Outcome = dict[str, Any]
Job = Callable[[int], Outcome]
Results = Callable[[Job], list[Outcome]]


def _rank_main(rank: int, folder: str, jobs: Sequence[Job], ranks: int) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        for job in jobs:
            torch.save(job(rank), f"{folder}/{job.__name__}.{rank}")
    finally:
        dist.destroy_process_group()


def run_on_ranks(jobs: Sequence[Job], folder: Path, ranks: int = 2) -> Results:
    """Runs every job once on so many ranks, in a folder; gives what each rank found for one."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    mp.start_processes(
        _rank_main, (str(folder), jobs, ranks), nprocs=ranks, start_method="forkserver"
    )

    def results(job: Job) -> list[Outcome]:
        files = [folder / f"{job.__name__}.{rank}" for rank in range(ranks)]
        return [torch.load(file, weights_only=True) for file in files]

    return results
