"""Questions of lesson 11: distributed autograd, and parameter servers."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "11/pairs": Question(
        answer="4",
        why="each of the two calls sends its argument there and its result back.",
        hint="Which tensors with a gradient travel in one call, and in which directions?",
        traps={"2": "The result of a call travels too.", "1": "There are two calls, and each has two directions."},
        choices=("1", "2", "4"),
    ),
    "11/gradients": Question(
        answer="in the context",
        why="several backwards may use the same weights at the same time, each in its own context.",
        hint="Ask what would be in .grad if two trainers went through one server at the same time.",
        choices=("in .grad", "in the context"),
    ),
    "11/forgotten": Question(
        answer="nothing",
        why="without a context the tensors travel as numbers only, and the backward ends where they came in.",
        hint="How would worker1 learn of the backward?",
        traps={"ones": "That would be right within a context."},
        choices=("ones", "nothing"),
    ),
    "11/staleness": Question(
        answer=lambda size: 2 * (size - 1) - 1,
        why="while one trainer computes, each of the others pushes once.",
        hint="Between the fetch and the push of one trainer: how many times does each of the others push?",
        traps={0: "That is right if all trainers wait for each other."},
        placeholder="20",
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
        choices=("DDP", "RPC", "both"),
    ),
    "11/eight-trainers": Question(
        answer=7,
        why="while one trainer computes, each of the seven others pushes once.",
        hint="How many updates come between the fetch and the push of one trainer?",
        traps={8: "Its own update comes after its gradient."},
    ),
    "11/updates": Question(
        answer={"patient": 2.0, "eager": 72.0},
        why="the patient server waits 0.5 seconds for the slowest; the eager one gets 7 * 10 + 2 gradients per second.",
        hint="How long does one round of the patient server take? And how many gradients per second does each trainer "
        "push to the eager one?",
        tolerance=0.01,
    ),
    "11/bounded": Question(
        answer=[True, True, False, True, True],
        why="the third gradient was two updates old; a rejected gradient does not increase the version.",
        hint="By how much may version and self.version differ? And what happens if another thread calls push "
        "between your comparison and your update?",
        traps={(True, True, True, True, True): "The third gradient is two updates old."},
    ),
}

_TABLE = """
chance = torch.Generator().manual_seed(rank)
rows, values = torch.randperm(1000, generator=chance)[:20], torch.randn(20, 16, generator=chance)
wanted = torch.zeros(1000, 16)
for r in range(world_size):
    chance = torch.Generator().manual_seed(r)
    wanted.index_add_(0, torch.randperm(1000, generator=chance)[:20], torch.randn(20, 16, generator=chance))
is_owner = rank == world_size - 1
"""

PUZZLES: dict[str, Puzzle] = {
    "11/only-rows": Puzzle(
        setup=_TABLE,
        call="solution(rows, values)",
        got="result if is_owner else 0",
        wanted="wanted if is_owner else 0",
        targets=(Target(measure=SENT, most=20 * (8 + 16 * 4)),),
        why="20 indices and 20 rows of numbers travel, and not 1,000 rows.",
        hint="Send the indices and their rows, and add them up on the owner.",
        wrong_hint="The owner returns the sum over all ranks, its own rows included.",
    ),
}
