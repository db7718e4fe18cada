"""Questions of lesson 18: a GPT."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import PEAK, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "18/lower": Question(
        answer="theirs",
        why="each of their positions but the last can look at the character that it is to guess.",
        hint="Ask what a mask of 0.0 and 1.0 forbids when it is added to the scores.",
        traps={"ours": "A low loss does not prove a good model."},
        choices=("ours", "theirs"),
    ),
    "18/worst": Question(
        answer=31,
        why="the last position has no later one to copy from, and has learnt nothing else.",
        hint="Which position cannot see the character that it is to guess?",
        traps={0: "That is right for a model that sees only the past: its first position has the least context."},
        placeholder="16",
    ),
    "18/second-attempt": Question(
        answer=40,
        why="snapshots were saved after 20 and after 40 steps; later steps were only in the memory of the dead rank.",
        hint="What is in the file when the rank dies after 53 steps?",
        traps={
            53: "The processes with steps 40 to 52 in memory have died.",
            0: "The script starts from the saved state.",
        },
        placeholder="10",
    ),
    "18/uniform": Question(
        answer=4.60517,
        why="the loss is minus the logarithm of the probability: -log(1 / 100) = log 100 = 4.6.",
        hint="The loss of a character is minus the natural logarithm of the probability that the model gave it.",
        traps={2.0: "That is the logarithm to base 10. PyTorch uses the natural logarithm."},
        tolerance=0.01,
    ),
    "18/tokens": Question(
        answer={"tokens of a rank": 288, "steps": 869},
        why="a rank has 9 pieces of 32 characters. A step has 1,152 tokens, so 868 steps are not quite enough.",
        hint="36 pieces are divided by 4 ranks. For the steps, divide by the tokens of all ranks and round up.",
    ),
    "18/sees-future": Question(
        answer={"ours": False, "theirs": True, "one too far": True},
        why="another last character changes the output of an earlier position only if that position can see it.",
        hint="Call the model with two texts that differ in the last character, and compare all positions before it.",
    ),
}

_ONE_STEP = """
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def network():
    torch.manual_seed(0)
    inner = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)
    return nn.Sequential(nn.Embedding(100, 64), *inner, nn.Linear(64, 100))


def loss_of(model, x, wanted):
    return cross_entropy(model(x).flatten(0, 1), wanted.flatten())


chance = torch.Generator().manual_seed(rank)
x, y = torch.randint(100, (2, 64, 32), generator=chance)
model = DistributedDataParallel(network())
loss_of(model, x, y).backward()
right = model.module[-1].weight.grad.clone()
model = DistributedDataParallel(network())
"""
_PARAMETERS = 100 * 64 + (64 * 256 + 256) + (256 * 64 + 64) + 2 * 64 + (64 * 100 + 100)

PUZZLES: dict[str, Puzzle] = {
    "18/one-step": Puzzle(
        setup=_ONE_STEP,
        call="solution(model, loss_of, x, y)",
        wanted="right",
        targets=(
            Target(measure=PEAK, most=3.5e6),
            Target(measure=SENT, most=lambda size: 2 * (size - 1) / size * 4 * _PARAMETERS),
        ),
        why="only the activations of one part are alive at a time, and only the last backward sends.",
        hint="Compute the gradient of one part after the other, each with its share of the loss. Which of the "
        "backwards "
        "may send?",
        wrong_hint="Return the gradient of the last layer, for the mean loss over the whole share and all ranks.",
    ),
}
