"""The pictures of processes and of their messages."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.messages.transfer_picture import _calls, _messages, exchanges
from ddp_notebook.lessons.nodes import places


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_places_have_the_numbers_that_torchrun_would_give():
    said = words(places(nodes=2, per_node=3))
    assert [word for word in said if word.isdigit()] == ["0", "1", "2", "3", "4", "5"]
    assert [word for word in said if word.startswith("local")] == ["local 0", "local 1", "local 2"] * 2
    with pytest.raises(UsageError, match=r"nodes \* per_node must be 1 to 64, got 9 \* 8 = 72"):
        places(9, 8)


def test_nothing_sent_is_said(session):
    session.run("dist.barrier()")
    with pytest.raises(UsageError, match="no message between two ranks was recorded"):
        exchanges(session.recording)


def test_messages_find_their_receivers(session):
    """Matched by order, by tag, and for any source. The picture has an arrow for each message."""
    session.run(
        "x = torch.ones(1)\n"
        "if rank == 0:\n"
        "    for work in [dist.isend(x, dst=1, tag=tag) for tag in (5, 6)]: work.wait()\n"
        "    dist.send(x, dst=1)\n"
        "else:\n"
        "    dist.recv(x, src=0, tag=6); dist.recv(x, src=0, tag=5); dist.recv(x)"
    )
    calls = _calls(session.recording, None)
    pairs = _messages(calls)
    assert [(a.rank, b.rank, a.tag, b.tag) for a, b in pairs] == [(0, 1, 6, 6), (0, 1, 5, 5), (0, 1, 0, 0)]
    figure = exchanges(session.recording)
    arrows = [child for child in figure.axes[0].texts if child.get_text() == ""]
    assert len(arrows) == 3
    assert figure._repr_png_()[0].startswith(b"\x89PNG")


def test_a_bar_is_as_long_as_its_rank_was_blocked(session):
    session.run(
        "import time\n"
        "if rank == 0: dist.send(torch.ones(1), dst=1)\n"
        "else:\n    time.sleep(0.4)\n    dist.recv(torch.ones(1), src=0)"
    )
    figure = exchanges(session.recording)
    longest = max(bar.get_width() for bar in figure.axes[0].patches if isinstance(bar, Rectangle))
    assert figure.axes[0].get_xlabel() == "time (ms)" and 300 < longest < 1000
