"""Questions of lesson 10: calls to other ranks, and references."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "10/runs-on": Question(
        answer=1,
        why="worker1 runs it, with its own variables.",
        hint="Only the name of the function and its arguments travel. Whose variables does it see?",
        traps={0: "Rank 0 has made the call; it does not run the function."},
    ),
    "10/naps": Question(
        answer=0.2,
        why="each call has its own thread at the callee, so all five sleep at the same time.",
        hint="rpc_async returns immediately, so the second call is made while the first one sleeps.",
        traps={1.0: "That would be rpc_sync, with one call after the other."},
        tolerance=0.5,
    ),
    "10/agent-calls": Question(
        answer=lambda size: 12 * (size - 1),
        why="each of the six steps has a select_action and a report, and all but rank 0 observe.",
        hint="Count the calls in Observer.play: how many in a step, how many steps, how many observers?",
        traps=lambda size: {6 * (size - 1): "The rewards are reported by calls, too."},
    ),
    "10/sum-by-calls": Question(
        answer=lambda size: {rank: size * (size + 1) // 2 for rank in range(size)},
        why="each call brought one number, and the last call completed all futures.",
        hint="worker0 keeps each number with its future, and fills all futures when world_size of them are there. "
        "Every rank calls init_rpc, the function on worker0, and shutdown; async_execution lets it return a future.",
    ),
}
