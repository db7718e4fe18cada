"""Dispatch of rank messages, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ddp_notebook.launch.options import StartOptions
from ddp_notebook.messages import ranks
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import CellDone, ClockReply, Formed, Hello, Ready, Registered, Vitals
from ddp_notebook.run.message_handlers import Dispatch
from ddp_notebook.run.session_parts import SessionParts


def of_ranks() -> set[type[Message]]:
    """Return the kinds of messages that ranks send: the right half of the table in `messages.ranks`."""
    lines = (ranks.__doc__ or "").splitlines()
    [at] = [line.index("rank -> notebook") for line in lines if "rank -> notebook" in line]
    names = {line[at:].split()[0] for line in lines if line.startswith("    ") and line[at - 1 : at] == " "}
    return {getattr(ranks, name) for name in names if hasattr(ranks, name)}


def vitals(request: int) -> Vitals:
    return Vitals(request=request, rss_bytes=0, device_bytes=0, running_cell=0, running_s=0.0)


def test_a_message_can_have_several_handlers_or_none():
    dispatch, got = Dispatch(), []
    dispatch.add({Vitals: lambda rank, message: got.append((1, rank, message.request))})
    dispatch.add({Vitals: lambda rank, message: got.append((2, rank, message.request))})
    dispatch.on_message(3, vitals(7))
    dispatch.on_message(3, ClockReply(request=1, sent_ns=0, rank_ns=0, boot=""))
    assert got == [(1, 3, 7), (2, 3, 7)]


def test_what_comes_before_anybody_is_there_is_nobodys():
    dispatch = Dispatch()
    dispatch.on_text(0, 1, b"text")
    dispatch.on_ended(0, "exited with status 1")
    dispatch.on_controller_ended()
    dispatch.on_gone()


def test_every_message_of_a_rank_has_a_handler(tmp_path):
    """The cluster itself handles those of the start."""
    kinds = of_ranks()
    assert len(kinds) > 10 and {CellDone, Vitals, Hello} < kinds
    dispatch = Dispatch()
    cluster: Any = SimpleNamespace(
        mark_token="ab12",
        directory=str(tmp_path),
        send=lambda *_: None,
        client_file=lambda: ("", 0),
        check_registered=lambda: None,
        alive=[],
        tell_what_is_slow=lambda _: None,
        placement=SimpleNamespace(names_of_machines=()),
    )
    hosts: Any = SimpleNamespace(notices=list)
    parts = SessionParts(cluster, dispatch, 2, StartOptions(), hosts)
    try:
        assert kinds - dispatch._handlers.keys() == {Hello, Formed, Ready, Registered}
    finally:
        parts.close()
