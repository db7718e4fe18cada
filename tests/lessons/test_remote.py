"""Calls to other ranks: the answers of programs match the recording, and the picture contains all of it."""

from __future__ import annotations

import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.lesson_widget import _plain
from ddp_notebook.lessons.remote.scenes import STORIES


def test_who_acts_is_who_has_the_agent(ranks):
    program = lessons.rpc("calls").guess("the rank that calls it").run()
    asked = [call for call in program.calls if call.function.endswith("select_action")]
    observed = {call.id: call for call in program.calls if call.function.endswith("observe")}

    assert (program.answer, program.is_right) == ("rank 0, who has the agent", False)
    assert sorted(call.src for call in asked) == sorted([*range(1, ranks)] * 2) and {call.dst for call in asked} == {0}
    assert {observed[call.parent].dst for call in asked} == set(range(1, ranks)), "made inside of observe"
    assert all(call.sent_ns < call.begun_ns <= call.ended_ns < call.returned_ns for call in asked)
    assert program.said[0].startswith(
        "Not 'the rank that calls it': rank 0, who has the agent; a method runs on the rank of its object"
    )


def test_a_reference_in_a_value_takes_another_request_and_answer(ranks):
    program = lessons.rpc("rrefs").guess("4").run()
    assert program.answer == "4" and program.is_right and program.value == [0.0, 1.0, 2.0, 3.0]
    assert {one.owner for one in program.references} == {1, ranks - 1}
    inner = next(one for one in program.references if 0 in {user.rank for user in one.users} and one.made_by == 1)
    assert {user.parent for user in inner.users if user.rank == 0} == {1}, "from who made the list"


def test_calls_of_a_batch_are_answered_together(ranks):
    program = lessons.rpc("batching").run()
    added = [call for call in program.calls if call.function.endswith("add")]
    assert program.answer == "after the last call has come" and program.is_right is None
    assert len(added) == 2 * (ranks - 1) and program.value == [[11 * (ranks - 1)] * 2] * (ranks - 1)
    assert max(call.begun_ns for call in added) <= min(call.returned_ns for call in added)


def test_a_backward_goes_through_two_pairs_for_each_call(ranks):
    program = lessons.rpc("backward").guess("4").run()
    assert program.is_right and program.value == [4.0, 4.0, 4.0]
    pairs = [(pair.src, pair.dst) for context in program.contexts for pair in context.pairs]
    assert sorted(pairs) == sorted([(0, 1), (1, 0), (0, ranks - 1), (ranks - 1, 0)])


def test_there_is_a_picture_and_a_state_before_and_after(ranks):
    program = lessons.rpc("calls")
    assert program.picture().get_suptitle() == STORIES["calls"].question and "def observe" in program.code
    assert _plain(program.state())["run"] is None and _plain(program.state())["said"] == []
    program.act({"do": "run", "guess": STORIES["calls"].choices[0]})
    state = _plain(program.state())
    assert state["right"] is True and len(state["calls"]) == len(program.calls) == 3 * (ranks - 1)
    assert [call["parent"] is None for call in state["calls"]].count(True) == ranks - 1
    assert f"{len(program.calls)} calls" in program.picture().get_suptitle()
    program.act({"do": "choose", "name": "rrefs"})
    assert program.state()["run"] is None and program.name == "rrefs"


def test_what_there_is_not_is_said(ranks):
    with pytest.raises(UsageError, match=r"^the program must be one of calls, rrefs, batching, backward"):
        lessons.rpc("love")
    with pytest.raises(UsageError, match=r"^the guess must be one of 'rank 0, who has the agent', 'the rank"):
        lessons.rpc("calls").guess("everybody")
