"""Waits between ranks: verdicts from the observed states of ranks."""

from __future__ import annotations

import pytest

from ddp_notebook.records.operation import Operation
from ddp_notebook.run.cells.watch import EndedRanks
from ddp_notebook.run.groups import diagnosis
from ddp_notebook.run.groups.diagnosis import Absences, LeftBehind, left_behind, stuck, verdict
from ddp_notebook.run.groups.rank_view import LoopFacts, RankView, StoreWaitView
from ddp_notebook.run.output import card


def waits(
    rank,
    name,
    number,
    *,
    group="default",
    ranks=(0, 1, 2, 3),
    root=None,
    tag=0,
    shape=(4,),
    dtype="float32",
    origin="",
    loop=None,
    limit_s=None,
    pair_number=1,
    key="0",
    known=(),
):
    operation = Operation(
        name=name,
        number=number,
        group=group,
        ranks=ranks,
        dtype=dtype,
        shapes=(shape,),
        nbytes=4096,
        root=root,
        tag=tag,
        since_s=12.0,
        origin=origin,
        key=key,
        limit_s=limit_s,
        pair_number=pair_number,
    )
    counts = {one: {"collective": count, "messages": (), "is_complete": True} for one, count in known}
    place = "cell line 7, in " + name
    return RankView(rank=rank, state="waiting", place=place, operation=operation, loop=loop, counts=counts)


def loop(steps, batches, ended=(), last=None):
    last = (1, batches) if last is None else last
    return LoopFacts(steps=steps, backwards=steps, drawn={"loader": batches}, passes={"loader": last}, ended=ended)


def at(rank, place="dataset.py:88 in load, from cell line 3"):
    return RankView(rank=rank, state="running", place=place)


def ended(rank, *, collectives=0, messages=(), is_complete=True, **more):
    counts = {"0": {"collective": collectives, "messages": messages, "is_complete": is_complete}}
    return RankView(rank=rank, state="ended", counts=counts, **more)


def views(*seen):
    return {view.rank: view for view in seen}


ALL_BUT_2 = [waits(rank, "all_reduce", 5) for rank in (0, 1, 3)]
VERDICTS = {
    "another operation": (
        views(*ALL_BUT_2, waits(2, "broadcast", 5)),
        "rank 2 is in broadcast #5, the others in all_reduce #5 of group default",
    ),
    "two against two": (
        views(*[waits(r, "all_reduce", 5) for r in (0, 1)], *[waits(r, "barrier", 5) for r in (2, 3)]),
        "ranks 0,1 are in all_reduce #5, ranks 2,3 are in barrier #5 of group default",
    ),
    "another shape": (
        views(*ALL_BUT_2, waits(2, "all_reduce", 5, shape=(8,))),
        "all_reduce #5 of group default has float32[8] on rank 2, float32[4] on ranks 0,1,3",
    ),
    "another dtype": (
        views(*ALL_BUT_2, waits(2, "all_reduce", 5, dtype="int32")),
        "all_reduce #5 of group default has int32[4] on rank 2, float32[4] on ranks 0,1,3",
    ),
    "not arrived": (
        views(*ALL_BUT_2, at(2)),
        "not arrived at all_reduce #5: rank 2 is at dataset.py:88 in load, from cell line 3",
    ),
    "ended": (
        views(*ALL_BUT_2, ended(2)),
        "ranks 0,1,3 wait in all_reduce #5, and rank 2 has ended the cell without it",
    ),
    "ended, in DDP": (
        views(waits(0, "all_reduce", 5, ranks=(0, 2), origin="ddp", loop=loop(2, 3)), ended(2, loop=loop(2, 3))),
        "rank 0 waits in all_reduce #5, and rank 2 has ended the cell without it: rank 2 has made 2 optimizer "
        "steps with "
        "3 batches, and rank 0 waits after 2 steps",
    ),
    "ended, in DDP with less data": (
        views(
            waits(0, "all_reduce", 5, ranks=(0, 2), origin="ddp", loop=loop(2, 3)),
            ended(2, loop=loop(2, 2, ended=("loader",))),
        ),
        "rank 0 waits in all_reduce #5, and rank 2 has ended the cell without it: rank 2 has made 2 optimizer "
        "steps with 2 batches, and rank 0 waits after 2 steps. The data of rank 2 ended after 2 batches, and rank 0 "
        "has taken 3: put `with Join([model]):` around the loop, or give all ranks as many batches",
    ),
    "ended, in DDP after a pass of equal length": (
        views(
            waits(0, "all_reduce", 5, ranks=(0, 2), origin="ddp", loop=loop(4, 5, last=(2, 1))),
            ended(2, loop=loop(4, 4, ended=("loader",))),
        ),
        "rank 0 waits in all_reduce #5, and rank 2 has ended the cell without it: rank 2 has made 4 optimizer "
        "steps with "
        "4 batches, and rank 0 waits after 4 steps",
    ),
    "ended, in FSDP with less data": (
        views(
            waits(0, "all_gather_single", 5, ranks=(0, 2), origin="fsdp", loop=loop(1, 2)),
            ended(2, loop=loop(1, 1, ended=("loader",))),
        ),
        "rank 0 waits in all_gather_single #5, and rank 2 has ended the cell without it: rank 2 has made 1 "
        "optimizer step "
        "with 1 batch, and rank 0 waits after 1 step. The data of rank 2 ended after 1 batch, and rank 0 has "
        "taken 2: give "
        "all ranks as many batches, because FSDP supports no Join",
    ),
    "ended, with a thread": (
        views(*ALL_BUT_2, ended(2, background="thread 'worker' at cell line 2 in work")),
        "ranks 0,1,3 wait in all_reduce #5, and rank 2 has ended the cell without it (thread 'worker' at cell line 2 "
        "in work goes on)",
    ),
    "ended without a send": (
        views(waits(0, "recv", 2, root=1, ranks=(0, 1)), ended(1)),
        "rank 0 waits in recv #2, and rank 1 has ended the cell without a send to rank 0",
    ),
    "ended without a receive": (
        views(waits(0, "send", 2, root=1, tag=3, ranks=(0, 1)), ended(1)),
        "rank 0 waits in send #2, and rank 1 has ended the cell without a receive from rank 0 with tag 3",
    ),
    "ended after a send with another tag": (
        views(waits(0, "recv", 2, root=1, tag=3, ranks=(0, 1)), ended(1, messages=[["send", 0, 5, 1]])),
        "rank 0 waits in recv #2, and rank 1 has ended the cell without a send to rank 0 with tag 3; it has sent one "
        "with tag 5",
    ),
    "cleaning up": (
        views(*ALL_BUT_2, RankView(rank=2, state="internal", place="cleaning up after the cell")),
        "not arrived at all_reduce #5: rank 2 is cleaning up after the cell",
    ),
    "gone": (
        views(*ALL_BUT_2, RankView(rank=2, state="died", place="killed by SIGKILL")),
        "rank 2 is gone (killed by SIGKILL), and ranks 0,1,3 wait for it",
    ),
    "no answer": (
        views(*ALL_BUT_2, RankView(rank=2, state="silent", place="its process 7 is stopped")),
        "not arrived at all_reduce #5: rank 2: no answer: its process 7 is stopped",
    ),
    "a ring of receives": (
        views(*[waits(r, "recv", 1, root=(r + 1) % 2, ranks=(0, 1)) for r in (0, 1)]),
        "they wait for each other: rank 0 in recv #1 from rank 1, rank 1 in recv #1 from rank 0",
    ),
    "a message with another tag": (
        views(waits(0, "send", 1, root=1, tag=3), waits(1, "recv", 1, root=0, tag=4)),
        "they wait for each other: rank 0 in send #1 to rank 1 with tag 3, rank 1 in recv #1 from rank 0 with tag 4",
    ),
    "a message with the same tag": (views(waits(0, "send", 1, root=1, tag=3), waits(1, "recv", 1, root=0, tag=3)), ""),
    "two groups": (
        views(waits(0, "barrier", 1, group="[0,1]", ranks=(0, 1)), waits(1, "barrier", 1, group="[1,0]", ranks=(0, 1))),
        "they wait for each other: rank 0 in barrier #1 of group [0,1] for rank 1, "
        "rank 1 in barrier #1 of group [1,0] for rank 0",
    ),
}


@pytest.mark.parametrize(("seen", "sentence"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts(seen, sentence):
    assert verdict(seen) == sentence


HEALTHY = {
    "nobody waits": views(at(0), at(1)),
    "all are in it": views(*ALL_BUT_2, waits(2, "all_reduce", 5)),
    "uneven all_to_all": views(*[waits(r, "all_to_all_single", 1, shape=(r + 1,)) for r in range(4)]),
    "a message that is taken": views(
        waits(0, "send", 1, root=1, ranks=(0, 1)), waits(1, "recv", 1, root=0, ranks=(0, 1))
    ),
}


@pytest.mark.parametrize("seen", HEALTHY.values(), ids=HEALTHY)
def test_nothing_is_said_of_what_goes_on(seen):
    assert verdict(seen) == ""
    assert stuck(seen) == {}


def test_stuck_is_who_cannot_go_on_whatever_the_running_ones_do():
    assert stuck(views(*ALL_BUT_2, at(2))) == {}, "it may arrive"
    assert set(stuck(views(*ALL_BUT_2, ended(2)))) == {0, 1, 3}
    assert stuck(views(*ALL_BUT_2, waits(2, "broadcast", 5))).keys() == {0, 1, 2, 3}
    chain = views(ended(0), waits(1, "recv", 1, root=0), waits(2, "recv", 1, root=1), at(3))
    assert stuck(chain) == {1: ("default", 1), 2: ("default", 1)}, "who waits for one that is stuck is stuck"
    assert stuck(views(waits(0, "recv", 1), ended(1), ended(2), at(3))) == {}, "from any rank: one still runs"
    assert set(stuck(views(waits(0, "recv", 1), ended(1), ended(2), ended(3)))) == {0}


def in_store(rank, *, is_of_session):
    store = StoreWaitView(call="new_group" if is_of_session else "TCPStore", is_of_session=is_of_session, since_s=3.0)
    return RankView(rank=rank, state="running", place="cell line 1", store=store)


def test_ranks_that_wait_for_ended_ranks_are_left_behind():
    assert left_behind(views(*ALL_BUT_2, ended(2))).keys() == {0, 1, 3}
    assert left_behind(views(*ALL_BUT_2, at(2))) == {}, "it runs"
    assert left_behind(views(*[waits(r, "recv", 1, root=1 - r) for r in (0, 1)], ended(2))) == {}, "for each other"
    chain = views(ended(0), waits(1, "recv", 1, root=0), waits(2, "recv", 1, root=1), at(3))
    assert left_behind(chain).keys() == {1, 2}
    assert left_behind(views(waits(0, "recv", 1), ended(1), at(2), ended(3))) == {}, "from any rank"
    assert left_behind(views(waits(0, "recv", 1, root=1), RankView(rank=1, state="outside"))) == {}


def test_what_is_on_its_way_arrives():
    assert left_behind(views(*ALL_BUT_2, ended(2, collectives=5))) == {}, "it has begun the collective"
    assert left_behind(views(*ALL_BUT_2, ended(2, collectives=4))).keys() == {0, 1, 3}
    waiter = waits(0, "recv", 2, root=1, tag=3, pair_number=2, ranks=(0, 1))
    assert left_behind(views(waiter, ended(1, messages=[["send", 0, 3, 2]]))) == {}
    assert left_behind(views(waiter, ended(1, messages=[["send", 0, 3, 1]]))).keys() == {0}
    uncounted = waits(0, "recv", 2, root=1, tag=3, pair_number=0, ranks=(0, 1))
    assert left_behind(views(uncounted, ended(1, is_complete=False))) == {}
    sends = waits(0, "send", 1, root=1, tag=3, ranks=(0, 1))
    assert left_behind(views(sends, ended(1, messages=[["recv", None, 3, 1]]))) == {}, "received from any rank"


def test_a_rank_that_has_ended_the_cell_may_still_act():
    assert left_behind(views(*ALL_BUT_2, ended(2, background="thread 'worker'"))) == {}
    assert left_behind(views(*ALL_BUT_2, ended(2, is_heard=False))) == {}
    assert set(stuck(views(*ALL_BUT_2, ended(2, is_heard=False)))) == {0, 1, 3}, "as the monitor sees it"
    serving = ended(2, may_serve=True)
    assert left_behind(views(*ALL_BUT_2, serving)).keys() == {0, 1, 3}, "no rank is left that calls it"
    assert left_behind(views(*ALL_BUT_2[:2], at(3), serving)) == {}


def test_waits_that_may_end_by_themselves_are_not_ended():
    def may_end(seen):
        return {rank: left.may_end for rank, left in left_behind(seen).items()}

    assert may_end(views(waits(0, "barrier", 1, ranks=(0, 1), limit_s=1800.0), ended(1))) == {0: True}
    assert may_end(views(waits(0, "barrier", 1, ranks=(0, 1), limit_s=30.0), ended(1))) == {0: False}
    assert may_end(views(in_store(0, is_of_session=True), ended(1))) == {0: True}
    assert may_end(views(in_store(0, is_of_session=False), ended(1))) == {0: False}, "any program may be a client"
    assert may_end(views(in_store(0, is_of_session=True), ended(1), at(2))) == {}


def test_a_cell_is_ended_after_two_equal_looks_and_the_grace():
    hang, other = views(*ALL_BUT_2, ended(2)), views(*ALL_BUT_2[:2], waits(3, "barrier", 6), ended(2))
    ranks = EndedRanks(3.0, 0.4, 0.1)
    assert [ranks.is_due(now) for now in (0.0, 0.3, 0.4)] == [False, False, True]

    def looks(ranks, *seen):
        found = []
        for now, one in seen:
            ranks.look(one, now)
            found.append((ranks.is_certain, ranks.is_over))
        return found

    no, yes, over = (False, False), (True, False), (True, True)
    assert looks(ranks, (0.4, hang), (0.5, other), (0.6, other)) == [no, no, yes]
    assert looks(ranks, (1.0, views(*ALL_BUT_2, at(2)))) == [no]
    assert looks(ranks, (1.4, hang), (1.5, hang), (4.4, hang), (4.5, hang)) == [no, yes, yes, over]
    never = EndedRanks(None, 0.4, 0.1)
    assert looks(never, (0.4, hang), (0.5, hang), (1e6, hang)) == [no, yes, yes]
    assert left_behind(hang)[0] == LeftBehind("all_reduce #5 of group default", may_end=True)


def test_a_rank_that_is_further_in_the_group_is_through():
    """The source of a broadcast continues before the others have the data."""
    seen = views(waits(0, "all_reduce", 6), *[waits(r, "broadcast", 5) for r in (1, 2, 3)])
    assert Absences(seen)[0] == {1, 2, 3}
    assert Absences(seen)[1] == set()
    assert stuck(seen) == {}
    assert verdict(seen) == ""


def test_groups_of_one_title_are_told_apart():
    """Groups of one dimension of a mesh have the same title."""
    seen = views(
        *(waits(rank, "all_reduce", 5, group="mesh_tp", ranks=(rank, rank + 1)) for rank in (0, 2)), at(1), ended(3)
    )
    assert Absences(seen)[0] == {1} and Absences(seen)[2] == {3}
    assert stuck(seen) == {2: ("mesh_tp", 5)}
    assert verdict(seen) == "rank 2 waits in all_reduce #5, and rank 3 has ended the cell without it"


def test_a_thousand_ranks_are_not_looked_at_a_million_times(monkeypatch):
    looks = 0
    takes_part = diagnosis._takes_part

    def counted(*given):
        nonlocal looks
        looks += 1
        return takes_part(*given)

    monkeypatch.setattr(diagnosis, "_takes_part", counted)
    everyone = tuple(range(1024))
    seen = views(*(waits(rank, "all_reduce", 5, ranks=everyone) for rank in everyone[1:]), at(0))
    assert verdict(seen).startswith("not arrived at all_reduce #5: rank 0 is at")
    assert 1024 <= looks <= 10 * 1024


def test_rows_of_the_table():
    assert ALL_BUT_2[0].doing == "waiting in all_reduce #5 of group default (float32[4], 4.1 kB, cell line 7)"
    assert waits(0, "recv", 1, root=2).doing == "waiting in recv #1 from rank 2 (float32[4], 4.1 kB, cell line 7)"
    assert at(2).doing == "at dataset.py:88 in load, from cell line 3"
    assert ended(0).doing == "ended the cell"


def test_a_thread_that_waits_is_named_and_its_rank_goes_on():
    """The main thread may still do what the others need, so the session is not stuck."""
    operation = waits(0, "all_reduce", 5, ranks=(0, 1)).operation
    place = "thread 'worker' at cell line 3 in work"
    seen = views(
        RankView(rank=0, state="running", place="cell line 9", operation=operation, thread=place),
        at(1, "cell line 8"),
    )
    assert seen[0].doing == f"at cell line 9, and {place} is waiting in all_reduce #5 of group default"
    assert seen[0].since_s == 12.0 and not stuck(seen)
    assert verdict(seen) == "not arrived at all_reduce #5: rank 1 is at cell line 8"


def test_hosts_are_named_where_there_are_several():
    call = Operation(name="barrier", number=1, group="default", ranks=(0, 1, 2))
    seen = {rank: RankView(rank=rank, state="waiting", operation=call, host="gpu1") for rank in (0, 1)}
    seen[2] = RankView(rank=2, state="running", place="cell line 7", host="gpu<2")
    assert verdict(seen) == "not arrived at barrier #1: rank 2 on gpu<2 is at cell line 7"
    text, page = card.as_text(seen, 5.0, verdict(seen)), card.as_html(seen, 5.0, verdict(seen))
    assert "ranks 0,1 on gpu1: waiting in barrier #1" in text and "rank 2 on gpu<2: at cell line 7" in text
    assert "<code>[0-1]</code> on gpu1</td>" in page and "<code>[2]</code> on gpu&lt;2</td>" in page


@pytest.mark.parametrize(
    ("thread", "remedy"),
    [
        ("thread 'Thread-5 (average)'", "give one of them its own group: group=dist.new_group()"),
        (
            "thread 'AsyncCheckpointExecutor_0'",
            "give the checkpoint its own group: dcp.async_save(..., process_group=dist.new_group())",
        ),
    ],
)
def test_threads_that_use_one_group_at_the_same_time_are_named(thread, remedy):
    calls = [
        Operation(name=name, number=7, group="default", ranks=(0, 1), threads=f"the main thread and {thread}")
        for name in ("barrier", "gather")
    ]
    views = {rank: RankView(rank=rank, state="waiting", operation=call) for rank, call in enumerate(calls)}
    assert verdict(views) == (
        "rank 0 is in barrier #7, rank 1 is in gather #7 of group default; "
        f"the main thread and {thread} of ranks 0,1 use group default at the same time, and may start its collectives "
        f"in another order on each rank: {remedy}"
    )


def test_two_groups_of_the_same_ranks():
    """Each rank has started one operation of the group in which it waits, and knows the other group."""

    def of(rank, key, **started):
        known = [(one, started.get(one, 0)) for one in ("a", "b")]
        return waits(rank, "all_reduce", 1, group="[0,1]", ranks=(0, 1), key=key, known=known)

    crossed = {0: of(0, "a", a=1), 1: of(1, "b", b=1)}
    assert verdict(crossed) == (
        "rank 0 is in all_reduce #1 of one group [0,1], rank 1 is in all_reduce #1 of another group of the same ranks: "
        "use the groups in the same order on all ranks"
    )
    assert set(stuck(crossed)) == {0, 1}
    assert verdict({0: of(0, "a", a=1), 1: of(1, "a", a=1)}) == ""
    on_its_way = {0: of(0, "a", a=1, b=1), 1: of(1, "b", b=1)}  # rank 1 will get its result
    assert verdict(on_its_way) == "" and stuck(on_its_way) == {}
