"""When a GPU may be queried, and NCCL's settings for ranks that share one. Runs without a GPU."""

from __future__ import annotations

import threading

import pytest

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank import gpu
from ddp_notebook.rank.group import join


def may_ask() -> bool:
    with gpu.asking() as may:
        return may


@pytest.fixture
def capture():
    """Simulate the capture of a CUDA graph."""
    yield gpu._beginning(lambda graph: None), gpu._ending(lambda graph: None)
    assert may_ask()


def test_nobody_asks_while_a_graph_is_captured(capture):
    begin, end = capture
    assert may_ask()
    begin("graph")
    begin("another")
    assert not may_ask()
    end("graph")
    assert not may_ask()
    end("another")


def test_a_capture_that_does_not_begin_keeps_nobody_from_asking(capture):
    def fail(graph: object) -> None:
        raise RuntimeError("no stream")

    with pytest.raises(RuntimeError, match="no stream"):
        gpu._beginning(fail)("graph")
    assert may_ask()
    capture[0]("graph")
    with pytest.raises(RuntimeError, match="no stream"):
        gpu._ending(fail)("graph")


def test_no_capture_begins_while_somebody_asks(capture):
    begin, end = capture
    has_begun = threading.Event()

    def begin_and_tell() -> None:
        begin("graph")
        has_begun.set()

    with gpu.asking() as may:
        assert may
        thread = threading.Thread(target=begin_and_tell)
        thread.start()
        assert not has_begun.wait(0.1)
    assert has_begun.wait(5)
    thread.join()
    end("graph")


def test_ranks_that_share_a_gpu_are_of_different_hosts_for_nccl(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    ids = {join.environment(place(rank, shares_gpu=True))["NCCL_HOSTID"] for rank in (0, 1)}
    assert len(ids) == 2
    assert "NCCL_HOSTID" not in join.environment(place(0, shares_gpu=False))
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    assert "NCCL_HOSTID" not in join.environment(place(0, shares_gpu=True)), "the user's own stays"


def place(rank: int, *, shares_gpu: bool) -> Form:
    return Form(
        epoch=1, rank=rank, local_rank=rank, world_size=2, local_world_size=2, group_rank=0, group_world_size=1,
        backend="nccl", device="cuda:0", store_host="127.0.0.1", store_port=1,
        store_at="unix:@a", store_key="", store_prefix="a", interface="lo",
        threads=1, form_timeout_s=1.0, shares_gpu=shares_gpu,
    )  # fmt: skip
