"""Memory of a step: bytes counted by hand, and the allocator's own record as a second opinion."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixprec.memory import (
    OverLimit,
    in_fresh_process,
    live_bytes,
    peak_bytes,
    process_peak,
    state_bytes,
    storage_bytes,
    tensors_in,
)

N = 1000
F32 = 4 * N


def test_a_chain_of_tensors_has_its_peak_where_most_are_alive() -> None:
    with live_bytes() as live:
        a = torch.zeros(N)
        b = a + 1
        c = torch.zeros(N, dtype=torch.float64)
        assert (live.now, live.peak) == (2 * F32 + 8 * N,) * 2
        del b, c
        assert live.now == F32
        d = a.to(torch.bfloat16)
        assert (live.now, live.peak) == (F32 + 2 * N, 2 * F32 + 8 * N)
        del a, d
        assert live.now == 0
    assert live.peak == 2 * F32 + 8 * N


def test_views_in_place_work_and_aliases_add_nothing() -> None:
    with live_bytes() as live:
        a = torch.zeros(N)
        view = a.view(10, -1).t()[2:]
        a.add_(1)
        torch.add(a, 1, out=a)
        expanded = a[:1].expand(10 * N)
        assert (live.now, live.peak) == (F32, F32)
        del a
        assert live.now == F32, "a view keeps the whole storage"
        del view
        assert live.now == F32
        del expanded
        assert live.now == 0


def test_a_storage_that_grows_counts_as_it_is() -> None:
    with live_bytes() as live:
        a = torch.zeros(N)
        a.resize_(3 * N)
        assert live.now == 3 * F32
        result = torch.empty(0)
        torch.add(torch.zeros(N), 1, out=result)
        assert live.now == 4 * F32


def test_what_existed_before_counts_from_its_first_use_or_from_the_start_if_named() -> None:
    named, met, unused = torch.zeros(N), torch.zeros(2 * N), torch.zeros(4 * N)
    with live_bytes([named, named[1:]]) as live:
        assert live.now == F32
        result = met + 1
        assert live.now == F32 + 4 * F32
        del met, named
        assert live.now == 2 * F32
    assert (live.peak, len(result), len(unused)) == (5 * F32, 2 * N, 4 * N)


def test_tensors_apart_never_count() -> None:
    data = torch.zeros(8 * N)
    with live_bytes(apart=[data]) as live:
        rows = data[:N]
        assert live.now == 0
        batch = data[torch.arange(N)]
        assert live.now == F32
    assert len(rows) == len(batch)


def test_a_tensor_that_dies_after_the_block_changes_nothing() -> None:
    with live_bytes() as live:
        a = torch.zeros(N)
    del a
    assert (live.now, live.peak) == (F32, F32)


def test_forward_and_backward_of_a_known_graph() -> None:
    w = torch.ones(N, requires_grad=True)
    with live_bytes([w]) as live:
        y = (w * 2).exp()  # exp keeps its result, times 2 keeps nothing
        assert live.now == 2 * F32
        loss = y.sum()
        del y
        assert live.now == 2 * F32 + 4, "the graph keeps the result"
        loss.backward()
        # of the gradients of exp and of times 2 one is left: the leaf's
        assert live.now == 2 * F32 + 4
        assert w.grad is not None
    # the loss and its gradient, w, and two of: the result, its gradient, the leaf's
    assert live.peak == 3 * F32 + 8


def test_a_step_of_adam_is_seen_to_its_state() -> None:
    layer = nn.Linear(N, 1, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    with live_bytes(layer.parameters()) as live:
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        gc.collect()
        state = storage_bytes(tensors_in(optimizer.state_dict()))
        assert state == 2 * F32 + 4, "two averages, and the count of steps"
        assert live.now == 2 * F32 + state
    assert live.peak > live.now


def test_checkpointing_lowers_the_peak() -> None:
    def peak(is_checkpointed: bool) -> int:
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
        x = torch.randn(256, 64, requires_grad=True)

        def step() -> None:
            h = x
            for block in blocks:
                h = checkpoint(block, h, use_reentrant=False) if is_checkpointed else block(h)
            h.sum().backward()

        found = peak_bytes(step, torch.device("cpu"))
        assert found is not None
        return found

    layer = 256 * 64 * 4
    plain, saving = peak(False), peak(True)
    assert plain >= 2 * 8 * layer
    assert saving <= plain - 6 * layer


@pytest.mark.filterwarnings("ignore:.*Memory block of unknown size")
def test_the_allocator_agrees() -> None:
    """The profiler records each allocation: with nothing inside an operation, the same peak."""
    model = nn.Sequential(*(nn.Sigmoid() for _ in range(3)))
    x = torch.randn(N, requires_grad=True)

    def step() -> None:
        model(x).backward(torch.ones(N))
        x.grad = None

    counted = peak_bytes(step, torch.device("cpu"), apart=[x])
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert now == 0
    assert counted == peak


def test_a_limit_stops_the_call_in_the_operation_that_exceeds_it() -> None:
    done: list[Tensor] = []

    def call() -> None:
        for _ in range(10):
            done.append(torch.zeros(N))

    with pytest.raises(OverLimit, match=r"memory: got 1\.49e-05 GiB .* limit is 1\.12e-05 GiB"):
        peak_bytes(call, torch.device("cpu"), limit=3 * F32)
    assert len(done) == 3
    assert peak_bytes(done.clear, torch.device("cpu"), limit=0) == 0


def test_another_device_has_no_count_and_nothing_runs() -> None:
    assert peak_bytes(lambda: pytest.fail("ran"), torch.device("mps")) is None


def test_meta_and_sparse_tensors_have_no_bytes_to_count() -> None:
    with live_bytes() as live:
        torch.zeros(N, device="meta") + 1
        index = torch.zeros(1, 1, dtype=torch.int64)
        sparse = torch.sparse_coo_tensor(index, torch.ones(1), (N,), check_invariants=False)
        assert live.now == 8 + 4
    assert sparse.shape == (N,)
    assert storage_bytes([torch.zeros(N, device="meta"), sparse]) == 0


def test_state_bytes_of_a_step() -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    nothing = {"grad_bytes": 0, "optimizer_bytes": 0}
    assert state_bytes(model, optimizer) == {"param_bytes": 20 * 4, **nothing}
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    # two moments a parameter, and a count of steps for each of the two
    state = (2 * 20 + 2) * 4
    held = {"param_bytes": 20 * 4, "grad_bytes": 20 * 4, "optimizer_bytes": state}
    assert state_bytes(model, optimizer) == held


def test_storage_bytes_counts_each_storage_once_and_whole() -> None:
    a = torch.zeros(N)
    assert storage_bytes([a, a[:3], a.view(10, -1), torch.zeros(2, dtype=torch.int8)]) == F32 + 2


def test_tensors_in_nested_state() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list(tensors_in({"x": [a, {"y": (b, 1)}], "z": c, "w": None})) == [a, b, c]


def test_the_process_peak_never_goes_down_and_a_fresh_process_has_its_own() -> None:
    before = process_peak()
    assert before is not None
    block = torch.ones(2**26)
    risen = process_peak()
    assert risen is not None
    assert risen >= before
    assert risen >= block.nbytes
    size = block.nbytes
    del block
    later = process_peak()
    assert later is not None
    assert later >= size
    value, fresh = in_fresh_process(abs, -3)
    assert value == 3
    assert fresh is not None
    assert 2**20 < fresh < risen


def test_without_the_kernel_status_the_rusage_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    # asked for once: by the next time a page more may be resident
    usage = resource.getrusage(resource.RUSAGE_SELF)
    monkeypatch.setattr(resource, "getrusage", {resource.RUSAGE_SELF: usage}.get)
    assert process_peak() == usage.ru_maxrss * 1024
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process_peak() is None
