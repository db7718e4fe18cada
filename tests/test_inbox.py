"""The inbox of cells on a rank."""

from __future__ import annotations

import os

import pytest

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import RunCell
from ddp_notebook.rank.cell.inbox import Inbox


def test_split_messages_arrive_whole_and_in_order():
    cells = [RunCell(cell=n, code=f"print('é\n{n}')", execution_count=n) for n in range(3)]
    stream = b"".join(cell.encode()[0] + b"\n" for cell in cells)

    for size in (1, 7, len(stream)):
        read_end, write_end = os.pipe()
        came: list[Message] = []
        inbox = Inbox(read_end, came.append, on_lost=lambda head, _: pytest.fail(str(head)))
        assert inbox.read(), "empty is not the end"
        for at in range(0, len(stream), size):
            os.write(write_end, stream[at : at + size])
            assert inbox.read()
        assert came == cells
        os.close(write_end)
        assert not inbox.read()
        os.close(inbox.fileno())
