"""The programs of calls to other ranks: explanation, question, and the answer from the recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_notebook.observe.remote import AutogradContext, RemoteCall

Answer = Callable[["Sequence[RemoteCall]", "Sequence[AutogradContext]"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStory:
    """One program before it is run.

    Args:
        title: Short title.
        lesson: Explanation in a sentence or two.
        question: Question before the run.
        choices: Possible answers.
        answer: Function that returns the right answer from the recording.
        why: Explanation of the answer.
    """

    title: str
    lesson: str
    question: str
    choices: tuple[str, ...]
    answer: Answer
    why: str


def _who_acts(calls: Sequence[RemoteCall], _: Sequence[AutogradContext]) -> str:
    asked = [call for call in calls if call.function.endswith("select_action")]
    if all(call.dst == 0 != call.src for call in asked):
        return "rank 0, who has the agent"
    return "the rank that calls it" if all(call.dst == call.src for call in asked) else "whichever is free"


def _messages(calls: Sequence[RemoteCall], _: Sequence[AutogradContext]) -> str:
    fetches = [call for call in calls if call.kind == "to_here" and call.src == 0]
    return str(2 * len(fetches))  # a request and an answer each


def _when_answered(calls: Sequence[RemoteCall], _: Sequence[AutogradContext]) -> str:
    asked = [call for call in calls if call.function == "add" and call.returned_ns is not None]
    first_back = min(call.returned_ns or 0 for call in asked)
    last_begun = max(call.begun_ns or 0 for call in asked)
    return "after the last call has come" if first_back >= last_begun else "as soon as add has returned"


def _pairs(_: Sequence[RemoteCall], contexts: Sequence[AutogradContext]) -> str:
    return str(sum(len(context.pairs) for context in contexts))


STORIES = {
    "calls": RemoteStory(
        title="who runs what",
        lesson="Rank 0 has an agent, and lets all others observe; they ask the agent what to do. "
        "agent.rpc_sync() is a reference to the agent whose methods are calls.",
        question="The others call agent.rpc_sync().select_action(state). Who runs select_action?",
        choices=("rank 0, who has the agent", "the rank that calls it", "whichever is free"),
        answer=_who_acts,
        why="a method runs on the rank of its object. The state is sent there, and the action is sent back.",
    ),
    "rrefs": RemoteStory(
        title="a reference to a reference",
        lesson="remote immediately returns a reference to the future result on the other rank. to_here copies the "
        "value to its caller; references in that value stay references.",
        question="box.to_here()[0].to_here(): how many messages carry values for it, there and back?",
        choices=("2", "4", "8"),
        answer=_messages,
        why="each to_here is a request and an answer. The first brings a list with a reference in it, the second the "
        "numbers. (Ranks also exchange internal messages of torch that count references.)",
    ),
    "batching": RemoteStory(
        title="one answer for many calls",
        lesson="A function with async_execution returns a future, and its caller gets the result of that future "
        "later. So the callee can collect calls, work once, and answer all of them, without a waiting thread.",
        question="When does the first call come back to its caller?",
        choices=("as soon as add has returned", "after the last call has come"),
        answer=_when_answered,
        why="the answer is in the future, and the futures are completed when the last number has arrived.",
    ),
    "backward": RemoteStory(
        title="a backward over ranks",
        lesson="Within a context, each call records its tensors: a send on the sending rank, a recv on the receiving "
        "rank. The backward goes through these pairs in the opposite direction.",
        question="Two calls, one after the other: how many pairs of send and recv does the backward go through?",
        choices=("1", "2", "4"),
        answer=_pairs,
        why="two for each call: one for its argument, one for its result.",
    ),
}
