"""Questions of lesson 08: distributed SGD by hand."""

from __future__ import annotations

import math

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

_PARAMETERS = 64 * 32 + 32 + 32 * 10 + 10  # number of parameters of the puzzle's model

QUESTIONS: dict[str, Question] = {
    "08/why": Question(
        answer="different",
        why="each rank uses only the gradient of its part of the images, so the weights become different: N "
        "models, each trained on an N-th of the data.",
        hint="Nothing is sent. How could one rank learn from the images of another?",
        traps={
            "faster": "Each rank has seen only its share of the images, so it has learned less, not faster.",
            "same": "The ranks begin with equal weights, but different gradients make them different.",
        },
        choices={
            "one model on all ranks, trained on all images": "same",
            "as many different models as ranks, each trained on a part of the images": "different",
            "the same model as with averaging, in less time": "faster",
        },
    ),
    "08/lost": Question(
        answer=2,
        why="1257 + 359 + 179 is 1795: int() cuts off 0.9, 0.4 and 0.7 of an image, and no rank gets the last two.",
        hint="Work out 0.7, 0.2 and 0.1 of 1797, cut each down to a whole number, and add them up.",
        traps={0: "The shares add up to 1, but the whole numbers do not add up to 1797.", 1: "Add up the three."},
        placeholder="1",
    ),
    "08/equal": Question(
        answer={
            "average gradients": True,
            "average parameters after each step": True,
            "average parameters before each step": False,
            "average parameters after each step, Adam": False,
        },
        why="an update that is linear in the gradient can be averaged before or after. Adam is not linear. With a "
        "mean before the step, each rank still makes its own step.",
        hint="Write one step as w - lr * g, and ask whether the mean over the ranks may be taken inside or outside.",
        choices={"the same losses": True, "other losses": False},
    ),
    "08/dealt": Question(
        answer=lambda size: math.ceil(1253 / size) * size,
        why="every rank gets the same number, so some images are used twice if the division has a remainder.",
        hint="All ranks get the same number, and no image is left out: round 1253 up to a multiple of the world size.",
        traps=lambda size: {1253 // size * size: "That is the number with drop_last=True."},
        placeholder="1000",
    ),
    "08/uneven": Question(
        answer=True,
        why="each rank's mean counts by its number of images, and so the sum is the mean over all of them.",
        hint="How much should the gradient of a rank count, compared with the others? Which two sums over the "
        "ranks give a mean over all images?",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "08/one-call": Puzzle(
        setup="torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).to(device)\n"
        "for parameter in model.parameters():\n"
        "    parameter.grad = torch.full_like(parameter, 1.0 + rank)",
        call="solution(model)",
        got="[parameter.grad.unique().tolist() for parameter in model.parameters()]",
        wanted="[[(world_size + 1) / 2]] * 4",
        targets=(
            Target(measure=COLLECTIVES, most=1),
            Target(measure=SENT, most=lambda size: 2 * (size - 1) / size * 4 * _PARAMETERS),
        ),
        why="one message has the latency of one message. DDP sends a few buckets instead, to overlap them.",
        hint="An all-reduce takes one tensor. Which functions of torch make one tensor of many, and many of one?",
        wrong_hint="Each parameter.grad must be the mean over the ranks: the sum divided by the world size.",
    ),
}
