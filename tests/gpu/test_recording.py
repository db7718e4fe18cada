"""Recordings of ranks on GPUs. Recording does not wait for the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import ddp_notebook

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

_WORK = """
a = torch.randn(4096, 4096, device=device)
for _ in range(20): a = a @ a / 64  # keeps the device busy for a while
"""


@pytest.fixture(scope="module")
def session():
    with ddp_notebook.start() as running:
        yield running


def test_values_of_a_gpu_are_the_values(session):
    session.run("x = torch.arange(8., device=device) + rank\ndist.all_reduce(x)\nx.fill_(-1)\ntorch.cuda.synchronize()")
    calls = [one for one in session.recording.collectives(op="all_reduce") if one.shapes == ((8,),)]
    size = session.world_size
    assert len(calls) == size
    for one in calls:
        assert one.input is not None and one.output is not None
        np.testing.assert_array_equal(one.input.first, np.arange(8) + one.rank)
        np.testing.assert_array_equal(one.output.first, np.arange(8) * size + size * (size - 1) / 2)


def test_an_operation_begins_when_the_device_comes_to_it(session, record_property):
    """The operation is queued behind 10 ms of work, and issued at once."""
    session.run(f"torch.cuda.synchronize()\n{_WORK}\nx = torch.ones(1 << 20, device=device)\ndist.all_reduce(x)")
    session.run("torch.cuda.synchronize()")
    calls = [one for one in session.recording.collectives(op="all_reduce") if one.shapes == ((1 << 20,),)]
    assert calls
    for one in calls:
        assert one.end_ns is not None
        assert one.issue_ns < one.start_ns < one.end_ns
        assert one.start_ns - one.issue_ns > 2e6
        record_property(f"queued on rank {one.rank} for", f"{(one.start_ns - one.issue_ns) / 1e6:.1f} ms")


def test_neither_a_call_nor_log_waits_for_the_device(session, record_property):
    code = f"""
import time
torch.cuda.synchronize()
{_WORK}
began = time.perf_counter()
dist.all_reduce(a[0].contiguous())
log(mean=a.mean())
issued_s = time.perf_counter() - began
torch.cuda.synchronize()
done_s = time.perf_counter() - began
"""
    session.run(code)  # the first run loads kernels and pins memory, which blocks
    session.run(code)
    for rank in range(session.world_size):
        issued_s, done_s = session["issued_s"][rank], session["done_s"][rank]
        record_property(f"rank {rank} issued in", f"{issued_s * 1e3:.1f} of {done_s * 1e3:.1f} ms")
        assert issued_s < done_s / 2
    assert len(session.recording.metrics["mean"].values) == 2 * session.world_size


def test_memory_of_the_device_is_recorded(session, record_property):
    session.run("b = torch.ones(1 << 26, device=device)\nimport time; time.sleep(2.5)")
    rows = session.recording.resources
    assert rows["gpu_allocated_bytes"].max() >= 4 << 26
    record_property("recorded at most", f"{rows['gpu_allocated_bytes'].max() >> 20} MiB")
