"""A message that does not fit its receive: both ranks get an error, and neither of them ends."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from ddp_notebook.errors import RankError
from ddp_notebook.rank.group.guard import message_comparison
from ddp_notebook.rank.group.guard.message_comparison import Messages, Posted

_REDUCES = "x = torch.ones(1); dist.all_reduce(x); int(x)"
_MESSAGES = {  # message of rank 0, receive of rank 1
    "longer": (
        "torch.arange(8.)",
        "torch.full((4,), 7.)",
        "8 float32 (32 bytes), rank 1 receives 4 float32 (16 bytes)",
    ),
    "shorter": (
        "torch.arange(4.)",
        "torch.full((8,), 7.)",
        "4 float32 (16 bytes), rank 1 receives 8 float32 (32 bytes)",
    ),
    "type": (
        "torch.arange(8.)",
        "torch.full((4,), 7., dtype=torch.float64)",
        "8 float32 (32 bytes), rank 1 receives 4 float64 (32 bytes)",
    ),
    "type of the same size": (
        "torch.ones(4, dtype=torch.uint16)",
        "torch.full((4,), 7, dtype=torch.int16)",
        "4 uint16 (8 bytes), rank 1 receives 4 int16 (8 bytes)",
    ),
    "empty": ("torch.ones(0)", "torch.full((2,), 7.)", "0 float32 (0 bytes), rank 1 receives 2 float32 (8 bytes)"),
    "large": (
        "torch.ones(1 << 20)",
        "torch.full((1,), 7, dtype=torch.int64)",
        "1048576 float32 (4194304 bytes), rank 1 receives 1 int64 (8 bytes)",
    ),
}
_ORDERS = {
    "blocking": "dist.send(t, 1, tag=3) if rank == 0 else dist.recv(t, 0, tag=3)",
    "the send is first": """
if rank == 0:
    work = dist.isend(t, 1, tag=3)
    store.set(f"sent {len(t)}", "")
else:
    store.wait([f"sent {sends}"])
    work = dist.irecv(t, 0, tag=3)
work.wait()
""",
    "the receive is first": """
if rank == 1:
    work = dist.irecv(t, 0, tag=3)
    store.set(f"takes {len(t)}", "")
else:
    store.wait([f"takes {takes}"])
    work = dist.isend(t, 1, tag=3)
work.wait()
""",
    "in a batch": """
op = dist.P2POp(dist.isend, t, 1, tag=3) if rank == 0 else dist.P2POp(dist.irecv, t, 0, tag=3)
for work in dist.batch_isend_irecv([op]): work.wait()
""",
}


@pytest.mark.long
@pytest.mark.parametrize("way", _ORDERS)
@pytest.mark.parametrize("kind", _MESSAGES)
def test_both_ranks_are_told_and_keep_their_tensors(session, kind, way):
    sent, taken, words = _MESSAGES[kind]
    epoch = session.ranks.epoch
    before = (
        f"sent, taken = {sent}, {taken}; sends, takes = len(sent), len(taken); t = sent if rank == 0 else taken\n"
        f"store = dist.PrefixStore({f'{kind} {way}'!r}, dist.distributed_c10d._get_default_store()); was = t.clone()"
    )
    session.run(before)
    with pytest.raises(RankError) as caught:
        session.run(_ORDERS[way], timeout_s=20)
    message = str(caught.value)
    assert (
        message.startswith("MessageMismatchError: message #")
        and f"with tag 3 does not match: rank 0 sends {words}" in message
    )
    assert message.endswith("No tensor was changed, and the group can be used (ranks 0-1)")
    shown = "\n".join(caught.value._render_traceback_())
    assert "recorder.py" not in shown and "guard" not in shown  # it ends at the user's line
    assert session.run("bool((t == was).all())")[1].result == "True"
    assert session.run("dist.send(sent, 1) if rank == 0 else dist.recv(sent, 0)", timeout_s=20).ok
    assert session.run(_REDUCES, timeout_s=20)[1].result == "2" and session.ranks.epoch == epoch


def test_in_a_group_its_name_and_the_sessions_ranks_are_told(session):
    session.run("pair = dist.new_group([0, 1], group_desc='pair')")
    with pytest.raises(
        RankError, match=r"from rank 1 to rank 0 in group pair does not match: rank 1 sends 1 bool \(1 bytes\)"
    ):
        session.run(
            "one = torch.ones(1, dtype=torch.bool if rank else torch.float32)\n"
            "dist.send(one, 0, group=pair) if rank else dist.recv(one, 1, group=pair)",
            timeout_s=20,
        )
    assert session.run(_REDUCES, timeout_s=20)[1].result == "2"


_LEGAL = {
    "other shapes of as many elements": "dist.send(torch.ones(2, 3), 1) if rank == 0 else dist.recv(torch.zeros(6), 0)",
    "tags in another order": """
sizes = {1: 4, 2: 7, 250: 9, 300: 11}
if rank == 0:
    works = [dist.isend(torch.ones(size), 1, tag=tag) for tag, size in sizes.items()]
    for work in works: work.wait()
else:
    for tag, size in reversed(sizes.items()):
        got = torch.zeros(size); dist.recv(got, 0, tag=tag); assert got.all()
""",
    "many that are sent before one is taken": """
if rank == 0:
    works = [dist.isend(torch.ones(1 + k % 5), 1) for k in range(1500)]
    dist.barrier()
    for work in works: work.wait()
else:
    dist.barrier()
    for k in range(1500):
        got = torch.zeros(1 + k % 5); dist.recv(got, 0); assert got.all()
""",
    "a receive from any rank between others": """
if rank == 0:
    for k in range(1, 6): dist.send(torch.full((k,), float(k)), 1)
else:
    for k in range(1, 6):
        got = torch.zeros(k); dist.recv(got, 0 if k % 2 else None); assert (got == k).all()
""",
    "a send that does not begin": """
if rank == 0:
    try: dist.send(torch.ones(3, 4).to_sparse(), 1)
    except Exception as error: print(type(error).__name__)
    try: dist.send(torch.ones(3, 4).T, 1)
    except Exception as error: print(type(error).__name__)
    dist.send(torch.ones(5), 1)
else:
    dist.recv(torch.ones(5), 0)
""",
    "objects": """
dist.send_object_list(["a" * 100, {"b": 1}], 1) if rank == 0 else dist.recv_object_list([None, None], 0)
""",
    "complex numbers, and a type without a code": """
for dtype in (torch.complex64, torch.float8_e5m2fnuz):
    one = torch.ones(3).to(dtype); dist.send(one, 1) if rank == 0 else dist.recv(one, 0)
""",
    "both ways at once": """
out, into = torch.full((3 + rank,), float(rank)), torch.zeros(4 - rank)
works = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)])
for work in works: work.wait()
assert (into == 1 - rank).all()
""",
}


@pytest.mark.parametrize("code", _LEGAL.values(), ids=_LEGAL)
def test_what_is_legal_passes(session, code):
    assert session.run(code, timeout_s=30).ok
    assert session.run(_REDUCES, timeout_s=20)[0].result == "2"


@pytest.mark.parametrize(
    ("taken", "words"), [("torch.zeros(4)", "4 float32"), ("torch.zeros(2, dtype=torch.int32)", "2 int32")]
)
def test_a_receive_from_any_rank_is_told_when_it_has_come(session, taken, words):
    with pytest.raises(
        RankError, match=rf"from rank 0 to rank 1 with tag 7 does not match: .* 2 float32 .* {words} .*src="
    ):
        session.run(f"dist.send(torch.ones(2), 1, tag=7) if rank == 0 else dist.recv({taken}, tag=7)", timeout_s=20)
    code = "t = torch.ones(3); dist.send(t, 1, tag=7) if rank == 0 else dist.recv(t, {}, tag=7)"
    assert session.run(code.format("None"), timeout_s=20).ok and session.run(code.format("0"), timeout_s=20).ok
    with pytest.raises(RankError, match="does not match"):
        session.run(f"dist.send(torch.ones(2), 1, tag=7) if rank == 0 else dist.recv({taken}, 0, tag=7)", timeout_s=20)
    assert session.run(_REDUCES, timeout_s=20)[0].result == "2"


@pytest.mark.parametrize("first", ["", "rank == 0", "rank == 1"], ids=["at once", "sends first", "receives first"])
def test_one_of_very_many_under_way_is_told(session, first):
    """The recorder forgets operations without a waiting thread; here a thread waits."""
    session.run(
        "ts = [torch.full((2 if k == 3 and rank else 4,), -1.0 if rank else float(k)) for k in range(200)]\n"
        "ops = [dist.P2POp(dist.irecv if rank else dist.isend, t, 1 - rank) for t in ts]\n"
        f"store = dist.PrefixStore('many {first}', dist.distributed_c10d._get_default_store())\n"
        "def all_of(): return dist.batch_isend_irecv(ops)"
    )
    code = "works, told = all_of(), []\n"
    if first:
        code = (
            f"if not ({first}): store.wait(['begun'])\nworks, told = all_of(), []\nif {first}: store.set('begun', '')\n"
        )
    code += (
        "for k, work in enumerate(works):\n"
        "    try: work.wait()\n"
        "    except RuntimeError as error: told.append((k, 'does not match' in str(error)))\n"
        "told, [k for k, t in enumerate(ts) if rank and (t != k).any()]"
    )
    result = session.run(code, timeout_s=30)
    assert [result[rank].result for rank in (0, 1)] == ["([(3, True)], [])", "([(3, True)], [3])"]
    assert session.run(_REDUCES, timeout_s=20)[0].result == "2"


@pytest.mark.long
def test_of_many_the_wrong_one_is_told(session):
    """Messages of random lengths in both directions, with several tags. One receive has a wrong length; the others
    work."""
    session.run("""
import random

def exchange(seed, is_wrong):
    random.seed(seed)
    plan = [(random.randint(0, 3), random.randint(0, 1), random.randint(1, 40)) for _ in range(random.randint(1, 60))]
    wrong, more = random.randrange(len(plan)), random.choice((-1, 1, 900))
    random.seed(f"{seed} {rank}")
    works, told = [], []
    for number, (tag, src, size) in enumerate(plan):
        if is_wrong and number == wrong and rank != src:
            size = max(size + more, 0)
        t = torch.full((size,), float(number))
        if rank == src:
            works.append((number, t, dist.isend(t, 1 - rank, tag=tag)))
        else:
            t.zero_()
            works.append((number, t, dist.irecv(t, 1 - rank, tag=tag)))
        while works and random.random() < 0.4:
            wait(works.pop(0), told)
    while works:
        wait(works.pop(0), told)
    return told == ([wrong] if is_wrong else [])


def wait(one, told):
    number, t, work = one
    try:
        work.wait()
        assert (t == number).all()
    except RuntimeError as error:
        assert "does not match" in str(error), error
        told.append(number)
""")
    result = session.run(
        "[(seed, w) for seed in range(150) for w in (False, True) if not exchange(seed, w)]", timeout_s=60
    )
    assert [result[rank].result for rank in (0, 1)] == ["[]", "[]"]
    assert session.run(_REDUCES, timeout_s=20)[0].result == "2"


def test_an_interrupted_message_causes_the_group_to_form_again(session):
    """Both sides count the same number, but one message is still under way and would match the next receive."""
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        session.run(
            "import gc\n"
            "from ddp_notebook.rank.group.recorder import Recorder\n"
            "[recorder] = [one for one in gc.get_objects() if type(one) is Recorder]\n"
            "guard = recorder.guard\n"
            "def interrupt(call): recorder.guard = guard; raise KeyboardInterrupt\n"
            "if rank: recorder.guard = interrupt; dist.recv(torch.zeros(2), 0)\n"
            "else: dist.isend(torch.full((2,), 7.0), 1)",
            timeout_s=20,
        )
    code = "t = torch.full((2,), 9.0 - rank); dist.send(t, 1) if rank == 0 else dist.recv(t, 0)\nt.tolist()"
    assert session.run(code, timeout_s=20)[1].result == "[9.0, 9.0]"


def test_after_a_stop_messages_are_counted_from_the_beginning(session):
    with pytest.raises(RankError, match=r"in recv #\d+, and rank 1 has ended the cell without a send to rank 0"):
        session.run(
            "dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)\n"
            "if rank == 0: dist.recv(torch.ones(3), 1)",
            timeout_s=10,
        )
    code = "dist.send(torch.ones(5), 1 - rank) if rank else dist.recv(torch.ones(5), 1)\n"
    assert session.run(code + "dist.recv(torch.ones(4), 0) if rank else dist.send(torch.ones(4), 1)", timeout_s=20).ok


def _both() -> list[Messages]:
    words = memoryview(mmap.mmap(-1, message_comparison.count_words(2) * 8)).cast("Q")
    return [Messages(words, rank, 2) for rank in (0, 1)]


def _posted(board: Messages, kind: str, tag: int, numel: int) -> Posted:
    posted = board.post(kind, 1 - board._rank, tag, torch.empty(numel))
    assert posted is not None
    return posted


def _compared(board: Messages, posted: Posted) -> str:
    try:
        board.compare(posted, (0, 1), "default", None)  # type: ignore[arg-type]  # its work is not used
    except message_comparison.MessageMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("who_looks", ["the sender", "the receiver"])
def test_a_mismatch_seen_by_one_side_is_later_seen_by_the_other(who_looks):
    sender, receiver = _both()
    if who_looks == "the sender":
        taken = _posted(receiver, "recv", 0, 2)
        sent = _posted(sender, "send", 0, 3)
        assert sender.look(sent)
        late, posted = receiver, taken
        for _ in range(1000):
            _posted(sender, "send", 1, 2)
    else:
        sent = _posted(sender, "send", 0, 3)
        taken = _posted(receiver, "recv", 0, 2)
        assert receiver.look(taken)
        late, posted = sender, sent
        for _ in range(1000):
            _posted(receiver, "recv", 1, 2)
    assert "message #1 from rank 0 to rank 1 does not match: rank 0 sends 3 float32" in _compared(late, posted)


def test_a_receive_during_a_receive_from_any_ends_tag_counting():
    """It is not known which of both matches first, not even to gloo."""
    _, receiver = _both()
    one = torch.ones(2)
    assert receiver.post("recv", 0, 5, one) is not None
    receiver.begin_from_any(5)
    assert receiver.post("recv", 0, 6, one) is not None and receiver.post("send", 0, 5, one) is not None
    assert receiver.post("recv", 0, 5, one) is None
    receiver.end_from_any(5, 0, (0, 1), "default", SimpleNamespace(_source_rank=lambda: 0))  # type: ignore[arg-type]
    assert receiver.post("recv", 0, 5, one) is None, "from now on"
    assert receiver.post("recv", 0, 6, one) is not None
    receiver.begin_from_any(7)
    receiver.end_from_any(7, 0, (0, 1), "default", SimpleNamespace())  # type: ignore[arg-type]  # of another torch
    assert receiver.post("recv", 0, 7, one) is None


def test_what_has_no_word_is_not_compared():
    sender, receiver = _both()
    huge = torch.empty(1 << message_comparison._NUMEL_BITS, dtype=torch.uint8, device="meta")
    odd = torch.ones(4).to(torch.float8_e5m2fnuz)
    for one in (huge, odd):
        sent, taken = sender.post("send", 1, 0, one), receiver.post("recv", 0, 0, torch.ones(2))
        assert sent is not None and taken is not None
        assert not sender.look(sent) and not receiver.look(taken)
    for tag in (-1, 1 << message_comparison._TAG_BITS):
        assert sender.post("send", 1, tag, torch.ones(2)) is None


@pytest.mark.long
@pytest.mark.parametrize("who_is_first", ["sender", "receiver"])
def test_numbers_begin_again_without_a_false_alarm(who_is_first):
    sender, receiver = _both()
    period = 1 << (64 - message_comparison._NUMBER_SHIFT)
    told = []
    for number in range(1, period + 600):
        numel = 1 + number % 7
        is_unlooked = number % 1000 == 5  # like one of a library that no thread inspects
        takes = numel + (number == 10)
        if who_is_first == "sender":
            sent, taken = _posted(sender, "send", 3, numel), _posted(receiver, "recv", 3, takes)
        else:
            taken, sent = _posted(receiver, "recv", 3, takes), _posted(sender, "send", 3, numel)
        if not is_unlooked:
            sender.look(sent)
            receiver.look(taken)
            told += [number for board, posted in ((sender, sent), (receiver, taken)) if _compared(board, posted)]
    assert told == [10, 10]
