"""When a GPU may be asked something, without one."""

from __future__ import annotations

import threading

import pytest

from ddp_notebook.rank import gpu


def may_ask() -> bool:
    with gpu.asking() as may:
        return may


@pytest.fixture
def capture():
    """Begins and ends the capture of a graph that is none."""
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
