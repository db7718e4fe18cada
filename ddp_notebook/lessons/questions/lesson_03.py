"""Questions of lesson 03: watch it train."""

from __future__ import annotations

from contextlib import suppress

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import PEAK
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target
from ddp_notebook.session import current

_picked = 0  # the last rank that the notebook has picked, for guesses after the end of the ranks


def _slow_rank(_: int) -> int:
    """Return the rank that the notebook has picked; 0 before that."""
    global _picked
    if (session := current()) is not None:
        with suppress(DDPNotebookError):  # the ranks may not have the variable yet
            _picked = int(session.pull("slow", 0)[0])
    return _picked


QUESTIONS: dict[str, Question] = {
    "03/first-loss": Question(
        answer=4.6,
        tolerance=0.15,
        why="an untrained model gives each of about 100 characters a probability of about 1/100, and ln 100 is 4.6.",
        hint="The loss is -ln p, where p is the probability of the right character.",
        traps={100: "The loss is a logarithm.", 2: "The loss uses the natural logarithm.", 0.01: "Take -ln of that."},
        placeholder="1.5",
    ),
    "03/others": Question(
        answer="slowest",
        why="no rank gets the averaged gradients before the last rank has sent its own.",
        hint="What does backward() need from the other ranks?",
        traps={
            "same": "Their own computation takes as long as before. Do they also need something from the slow rank?",
            "mean": "Ranks do not share their work. Each waits for the last one.",
        },
        choices={
            "as long as before": "same",
            "as long as the mean of all ranks": "mean",
            "as long as on the slow rank": "slowest",
        },
    ),
    "03/which": Question(
        answer=_slow_rank,
        why="it does not wait. All the others wait for it.",
        hint="Look for the row of the timeline that has no hollow bars.",
        choices=lambda size: {f"rank {rank}": rank for rank in range(size)},
    ),
    "03/steps": Question(
        answer=130,
        why="100 fast steps and 30 slow ones, and each is a step of all ranks together.",
        hint='Every rank takes part in every step. session["steps_done"] copies the counters of the ranks.',
    ),
    "03/slow-rank": Question(
        answer=_slow_rank,
        why="the recording contains the time that each rank waited. The slow rank waits least.",
        hint="`session.recording.straggler()` has an attribute `rank`; None means that no rank is slow.",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "03/memory": Puzzle(
        setup="torch.manual_seed(rank)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)\n"
        "batches = [torch.randn(128, 64, device=device) for _ in range(20)]\n"
        "with torch.no_grad():\n"
        "    wanted = sum(net(one).square().mean().item() for one in batches) / 20",
        call="solution(net, batches)",
        got="float(result)",
        wanted="wanted",
        targets=(Target(measure=PEAK, most=1_000_000),),
        why="a loss as a plain number keeps nothing alive, so each graph is freed before the next one.",
        hint="A sum of tensors keeps the graph of every step. What does `loss.item()` return?",
        wrong_hint="Return the mean of the losses of all batches as a number.",
    ),
}
