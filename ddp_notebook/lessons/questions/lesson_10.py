"""Questions of lesson 10: calls to other ranks, and references."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target
from ddp_notebook.lessons.questions.returned import returned

QUESTIONS: dict[str, Question] = {
    "10/runs-on": Question(
        answer=1,
        why="worker1 runs it, with its own variables.",
        hint="Only the name of the function and its arguments travel. Whose variables does it see?",
        traps={0: "Rank 0 has made the call; it does not run the function."},
        choices={"0": 0, "1": 1},
    ),
    "10/select-action": Question(
        answer="rank 0, who has the agent",
        why="the agent is on rank 0, and a method runs where its object is.",
        hint="The call goes through a reference to the agent. Which rank owns the agent?",
        traps={
            "the rank that calls it": "The caller sends the call, and waits.",
            "whichever is free": "A call names the rank that runs it: the owner of the reference.",
        },
        choices=("rank 0, who has the agent", "the rank that calls it", "whichever is free"),
    ),
    "10/messages": Question(
        answer="4",
        why="each to_here is a request and an answer, and there are two of them.",
        hint="One to_here gets the list, the other the numbers. How many messages does each need?",
        traps={"2": "Each to_here has a request and an answer.", "8": "The second to_here goes directly to the owner."},
        choices=("2", "4", "8"),
    ),
    "10/first-add": Question(
        answer="after the last call has come",
        why="add returns a future, and the caller gets the value when the future is completed.",
        hint="What does add return, and when does it have a value?",
        traps={
            "as soon as add has returned": "It returns a future without a value, and the caller waits for the value."
        },
        choices=("as soon as add has returned", "after the last call has come"),
    ),
    "10/deep": Question(
        answer="it never ends",
        why="each level blocks a thread, and there are 16 threads on each of the two ranks.",
        hint="How many threads wait when the depth is 32, and which thread runs the next call?",
        traps={
            "it returns 60": "Each level needs a thread that waits for the next one.",
            "an error: too many calls": "The calls wait in a queue, and no error is raised.",
        },
        choices=("it returns 60", "an error: too many calls", "it never ends"),
    ),
    "10/naps": Question(
        answer=0.2,
        why="each call has its own thread at the callee, so all five sleep at the same time.",
        hint="rpc_async returns immediately, so the second call is made while the first one sleeps.",
        traps={1.0: "That would be rpc_sync, with one call after the other."},
        tolerance=0.5,
        placeholder="0.01",
    ),
    "10/agent-calls": Question(
        answer=lambda size: 12 * (size - 1),
        why="each of the six steps has a select_action and a report, and all but rank 0 observe.",
        hint="Count the calls in Observer.play: how many in a step, how many steps, how many observers?",
        traps=lambda size: {6 * (size - 1): "The rewards are reported by calls, too."},
        placeholder="5",
    ),
    "10/which": Question(
        answer={
            "you need the result in the next line": "rpc_sync",
            "ten ranks should work at the same time, and you need all results": "rpc_async",
            "a large table is made on another rank and stays there": "remote",
        },
        why="rpc_sync blocks until the result is there, rpc_async returns a future, remote leaves the value there.",
        hint="Must the value come to you at all? And may the program go on before it is there?",
    ),
    "10/threads": Question(
        answer={"12 calls": 0.2, "40 calls": 0.6},
        why="16 calls sleep at the same time: 40 calls need three rounds.",
        hint="How many calls can sleep at the same time? How many rounds are that?",
        tolerance=0.02,
    ),
    "10/sum-by-calls": Question(
        answer=lambda size: {rank: size * (size + 1) // 2 for rank in range(size)},
        why="each call brought one number, and the last call completed all futures.",
        hint="When can worker0 answer the first call, and what can the function return until then? "
        "async_execution allows a future.",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "10/few-calls": Puzzle(
        setup="from ddp_notebook.lessons.remote.questions_by_calls import asked",
        call="asked(solution)",
        got="result['is right']",
        wanted="1.0",
        targets=(Target(measure=returned("calls to worker0"), most=2),),
        why="a call takes 16 questions, so two calls are enough, and both can be under way at the same time.",
        hint="questions.split(16) has two parts. The overhead is per call, not per question.",
        wrong_hint="Return the answers in the order of the questions: (32, 8).",
    ),
}
