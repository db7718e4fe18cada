"""The pipes of a host server's child."""

from __future__ import annotations

import os

import pytest

from ddp_notebook.launch.host.pipes import Pipes


@pytest.fixture
def pipes():
    made = Pipes(inbox=True)
    yield made
    made.close_near()
    made.close_far()


def near(pipes: Pipes, fd: int) -> int:
    return next(pipe for pipe, its_fd in pipes.outputs.items() if its_fd == fd)


def test_text_of_fd_2_comes_before_text_of_fd_1_that_was_written_after_it(pipes):
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

    assert not pipes.tell(data)
    assert not pipes.tell(b"end")
    received = b""
    while not pipes.tell(b""):
        received += os.read(inbox, 1 << 16)
    os.set_blocking(inbox, False)
    while len(received) < len(data) + 3:
        received += os.read(inbox, 1 << 16)

    assert received == data + b"end"


def test_a_child_that_has_ended_takes_everything(pipes):
    pipes.close_far()

    assert pipes.tell(b"x" * 300_000)
