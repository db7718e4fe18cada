"""Questions of lesson 11: distributed autograd, and parameter servers."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "11/gradients": Question(
        answer="in the context",
        why="several backwards may use the same weights at the same time, each in its own context.",
        hint="Ask what would be in .grad if two trainers went through one server at the same time.",
    ),
    "11/forgotten": Question(
        answer="nothing",
        why="without a context the tensors travel as numbers only, and the backward ends where they came in.",
        hint="How would worker1 learn of the backward?",
        traps={"ones": "That would be right within a context."},
    ),
    "11/staleness": Question(
        answer=lambda size: 2 * (size - 1) - 1,
        why="while one trainer computes, each of the others pushes once.",
        hint="Between the fetch and the push of one trainer: how many times does each of the others push?",
        traps={0: "That is right if all trainers wait for each other."},
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
        why="the third gradient was two updates old; a rejected gradient does not increase the version.",
        hint="Compare version with self.version, take the step and count it under the lock, or else return False.",
        traps={(True, True, True, True, True): "The third gradient is two updates old."},
    ),
}
