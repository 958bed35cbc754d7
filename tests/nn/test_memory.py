"""What converted layers keep: nothing from step to step, and a quarter of the activations."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from live_tensors import live_tensors, new_tensors
from torch import Tensor, nn

import mixprec

STOCHASTIC_DELAYED = mixprec.Recipe.from_dict(
    {"variant_of": "fp8_delayed", "grad_input": {"a": {"rounding": "stochastic"}}}
)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 8))
    mixprec.convert(model, STOCHASTIC_DELAYED)
    return model


def batch(index: int, width: int = 16) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(index))


def test_training_leaks_no_tensors_even_when_forward_raises() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mixprec.attach(model, optimizer)
    counts, before = {}, live_tensors()
    for step in range(1, 201):
        if step % 10 == 0:
            with pytest.raises(ValueError, match=r"x: got shape \(8, 15\)"):
                model(batch(step, 15))
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        if step in (20, 200):
            counts[step] = new_tensors(before)
    assert counts[200] == counts[20]


def test_a_model_that_was_trained_is_freed_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        mixprec.attach(model, optimizer)
        for step in range(2):
            model(batch(step)).square().mean().backward()
            optimizer.step()
        gone = [weakref.ref(tensor) for tensor in (model[0].weight, model[3])]
        gone += [weakref.ref(state) for state in model[2].numerics_buffers().values()]
        del model, optimizer
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


# pages as they are counted one by one: each processor hands on late what statm has of it
STACK = """
import sys, torch, mixprec
from torch import nn

def resident():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Rss:"))

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(48)))
mixprec.convert(model, sys.argv[1])
model(torch.randn(64, 256)).sum().backward()
x = torch.randn(16384, 256)
before = resident()
y = model(x)
print(resident() - before - y.nbytes)
"""


@functools.cache
def grown(recipe: str) -> int:
    """Bytes that the stack keeps in a process of its own."""
    # glibc keeps freed blocks unless each has a mapping of its own
    run = subprocess.run(
        [sys.executable, "-c", STACK, recipe],
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "fp8_rowwise"])
def test_process_memory_confirms_what_a_deep_stack_saves(recipe: str) -> None:
    kept = grown("fp32")
    # 47 inner activations of 16 MiB; x itself was there before
    assert kept > 47 * 16 * 2**20
    assert grown(recipe) <= 0.27 * kept
