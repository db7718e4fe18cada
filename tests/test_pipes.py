"""The output pipes of a child process of a host server."""

from __future__ import annotations

import io
import os
import random
import threading

import pytest

from ddp_notebook.launch.host.pipes import ChildPipes, _bytes_in
from ddp_notebook.wire import stream_order
from ddp_notebook.wire.marks import CellEnd, Change, DisplayMark
from ddp_notebook.wire.stream_order import ChangeMarks, MarkingWriter, StreamMerge

TOKEN = "0123456789abcdef"


@pytest.fixture
def pipes():
    made = ChildPipes(inbox=True)
    yield made
    made.close_near()
    made.close_far()


def near(pipes: ChildPipes, fd: int) -> int:
    return next(pipe for pipe, its_fd in pipes.outputs.items() if its_fd == fd)


def test_stderr_text_precedes_stdout_text_that_was_written_later(pipes):
    os.write(pipes.stderr, b"first")
    os.write(pipes.stdout, b"second")

    assert list(pipes.read(near(pipes, 1))) == [(2, b"first"), (1, b"second")]
    assert list(pipes.read(near(pipes, 2))) == []


def test_the_end_of_a_pipe_is_told_once_its_text_was_read(pipes):
    os.write(pipes.stdout, b"last words")
    inbox = pipes.inbox_of_child
    assert inbox is not None
    pipes.close_far()
    out = near(pipes, 1)

    assert list(pipes.read(out)) == [(1, b"last words")]
    assert out not in pipes.ended
    assert list(pipes.read(out)) == []
    assert out in pipes.ended
    pipes.close(out)
    assert out not in pipes.outputs
    assert not pipes.ended - set(pipes.outputs)


def test_what_an_inbox_cannot_take_waits_and_keeps_its_order(pipes):
    data = os.urandom(300_000)
    inbox = pipes.inbox_of_child
    assert inbox is not None

    assert not pipes.put_in_inbox(data)
    assert not pipes.put_in_inbox(b"end")
    received = b""
    while not pipes.put_in_inbox(b""):
        received += os.read(inbox, 1 << 16)
    os.set_blocking(inbox, False)
    while len(received) < len(data) + 3:
        received += os.read(inbox, 1 << 16)

    assert received == data + b"end"


def test_a_child_that_has_ended_takes_everything(pipes):
    pipes.close_far()

    assert pipes.put_in_inbox(b"x" * 300_000)


def change(number: int) -> bytes:
    return Change(number).encode(TOKEN)


@pytest.mark.parametrize("seed", range(20))
def test_both_streams_are_merged_in_the_order_of_their_writes(seed):
    drawn = random.Random(seed)
    pipes, written, fd = {1: b"", 2: b""}, {0: b"", 1: b"", 2: b""}, 1
    for number in range(60):
        if drawn.random() < 0.6:
            pipes = {its_fd: data + change(number + 1) for its_fd, data in pipes.items()}
            fd = 3 - fd
        text = f"{fd}:{number} {chr(0x1E) * drawn.randrange(2)}\n".encode()
        pipes[fd] += text
        written[0] += text
        written[fd] += text
    merge, read = StreamMerge(TOKEN), {0: b"", 1: b"", 2: b""}
    while any(pipes.values()):
        its_fd = drawn.choice([fd for fd, data in pipes.items() if data])
        size = drawn.randint(1, 40)
        data, pipes[its_fd] = pipes[its_fd][:size], pipes[its_fd][size:]
        for found_fd, text in merge.feed(its_fd, data):
            read[0] += text
            read[found_fd] += text
    assert read == written
    assert list(merge.rest()) == []


def test_text_after_half_a_change_is_held_until_the_cell_ends():
    merge = StreamMerge(TOKEN)
    assert list(merge.feed(1, b"a" + change(1) + b"b")) == [(1, b"a")], "an interrupt came before the second mark"
    end = CellEnd(7).encode(TOKEN)
    assert list(merge.feed(1, end)) == [(1, b"b" + end)]
    assert list(merge.feed(2, change(2) + b"d")) == []
    assert list(merge.feed(1, b"c" + change(2))) == [(1, b"c"), (2, b"d")], "later changes count again"


def test_text_of_a_dead_child_is_released(pipes):
    os.write(pipes.stdout, b"a" + change(1) + b"b")
    made = ChildPipes(inbox=False, mark_token=TOKEN)
    os.write(made.stderr, b"x" + change(1) + b"y")
    os.write(made.stdout, b"a")
    assert list(made.rest()) == [(2, b"x"), (1, b"a"), (2, b"y")]
    made.close_near()
    made.close_far()
    assert b"".join(data for _, data in pipes.rest()) == b"a" + change(1) + b"b", "without a token nothing is a mark"


def test_a_long_text_does_not_wait():
    merge = StreamMerge(TOKEN)
    assert list(merge.feed(2, change(1) + b"x" * (1 << 21))) == [(2, b"x" * (1 << 21))]


def test_a_mark_at_the_end_of_the_text_is_not_held():
    """The text of a thread that displays between two cells may end with the mark."""
    data = b"text" + DisplayMark(5).encode(TOKEN)
    assert list(StreamMerge(TOKEN).feed(1, data)) == [(1, data)]


def test_stderr_text_after_the_last_change_precedes_the_cell_end():
    merge, end = StreamMerge(TOKEN), CellEnd(7, 0.1).encode(TOKEN)
    assert list(merge.feed(2, change(1) + b"error")) == []
    assert list(merge.feed(1, b"text" + change(1) + end)) == [(1, b"text"), (2, b"error"), (1, end)]


def test_a_flush_without_text_puts_no_mark_into_the_pipes():
    """In this case a Python text stream calls `write` with no bytes. Each cell flushes both streams at its end."""
    pipes = {1: os.pipe(), 2: os.pipe()}
    try:
        changes = ChangeMarks({fd: far for fd, (_, far) in pipes.items()}, TOKEN)
        stream = io.TextIOWrapper(MarkingWriter(2, changes), line_buffering=True)
        stream.flush()
        stream.buffer.write(b"")
        assert {fd: _bytes_in(near) for fd, (near, _) in pipes.items()} == {1: 0, 2: 0}
        changes.to(2)
        assert {fd: os.read(near, 100) for fd, (near, _) in pipes.items()} == {1: change(1), 2: change(1)}
    finally:
        for ends in pipes.values():
            for end in ends:
                os.close(end)


def test_a_flush_of_another_thread_keeps_the_order(monkeypatch):
    """A thread flushes the start of a line, and is delayed while its main thread goes on."""
    readable, far = os.pipe()
    changes = ChangeMarks({1: far, 2: far}, TOKEN)
    changes.fd = far  # no marks
    stream = io.TextIOWrapper(MarkingWriter(far, changes), line_buffering=True)
    has_taken, may_write = threading.Event(), threading.Event()
    write = stream_order._write

    def delayed(writer, data):
        if threading.current_thread() is flusher:
            has_taken.set()
            assert may_write.wait(10)
        return write(writer, data)

    def flush():
        with changes.flushing:
            stream.flush()

    monkeypatch.setattr(stream_order, "_write", delayed)
    flusher = threading.Thread(target=flush)
    stream.write("1")
    flusher.start()
    assert has_taken.wait(10)
    threading.Timer(0.2, may_write.set).start()
    stream.write("\n2\n")
    flusher.join()
    stream.close()
    os.close(far)
    with os.fdopen(readable, "rb") as end:
        assert end.read() == b"1\n2\n"
