"""What notebooks 10 and 11 ask, by name: the number of the notebook and a word."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS = {
    # ---- 10: calls to other ranks, and references
    "10/runs-on": Question(
        answer=1,
        why="worker1 runs it, with its own variables.",
        hint="Only the name of the function and its arguments travel. Whose variables does it see?",
        traps={0: "Rank 0 has made the call; it does not run the function."},
    ),
    "10/naps": Question(
        answer=0.2,
        why="each call has a thread of its own at the callee, so all five sleep at the same time.",
        hint="rpc_async comes back at once, so the second call is made while the first one sleeps.",
        traps={1.0: "So it would be with rpc_sync, one after the other."},
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
        why="each call brought one number, and the last of them let all be answered.",
        hint="worker0 keeps each number with its future, and fills all futures when world_size of them are there. "
        "Every rank calls init_rpc, the function on worker0, and shutdown; async_execution lets it return a future.",
    ),
    # ---- 11: distributed autograd, and parameter servers
    "11/gradients": Question(
        answer="in the context",
        why="several backwards may go through the same weights at the same time, each in a context of its own.",
        hint="Ask what would be in .grad if two trainers went through one server at the same time.",
    ),
    "11/forgotten": Question(
        answer="nothing",
        why="without a context the tensors travel as numbers only, and the backward ends where they came in.",
        hint="Who would tell worker1 that there is a backward?",
        traps={"ones": "Within a context it would be."},
    ),
    "11/staleness": Question(
        answer=lambda size: 2 * (size - 1) - 1,
        why="while one trainer computes, each of the others pushes once.",
        hint="Between the fetch and the push of one trainer: how many times does each of the others push?",
        traps={0: "So it is where all wait for each other."},
    ),
    "11/which": Question(
        answer={
            "every rank has the whole model and its share of the images": "DDP",
            "games run on other machines, and ask one policy": "RPC",
            "a table for all users in one place, dense layers everywhere": "both",
            "a server whose trainers must not wait for each other": "RPC",
        },
        why="collectives where all do the same at the same time, calls where they do not.",
        hint="Ask whether all ranks are in the same line at the same time.",
    ),
    "11/bounded": Question(
        answer=[True, True, False, True, True],
        why="the third gradient had been passed by two updates; what is not taken makes no new version either.",
        hint="Compare version with self.version, take the step and count it under the lock, or else return False.",
        traps={(True, True, True, True, True): "The third gradient is two updates old."},
    ),
}
