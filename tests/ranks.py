"""Jobs that run on two ranks of gloo, for tests of what ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
Outcome = dict[str, Any]
Job = Callable[[int], Outcome]
Results = Callable[[Job], list[Outcome]]


def _rank_main(rank: int, folder: str, jobs: Sequence[Job]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        for job in jobs:
            torch.save(job(rank), f"{folder}/{job.__name__}.{rank}")
    finally:
        dist.destroy_process_group()


def run_on_both(jobs: Sequence[Job], folder: Path) -> Results:
    """Runs every job once on two ranks; gives what each rank found for one of them."""
    mp.spawn(_rank_main, (str(folder), jobs), nprocs=RANKS)

    def results(job: Job) -> list[Outcome]:
        files = [folder / f"{job.__name__}.{rank}" for rank in range(RANKS)]
        return [torch.load(file, weights_only=True) for file in files]

    return results
