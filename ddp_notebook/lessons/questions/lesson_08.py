"""Questions of lesson 08: distributed SGD by hand."""

from __future__ import annotations

import math

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "08/lost": Question(
        answer=2,
        why="1257 + 359 + 179 is 1795: int() cuts off 0.9, 0.4 and 0.7 of an image, and no rank gets the last two.",
        hint="Work out 0.7, 0.2 and 0.1 of 1797, cut each down to a whole number, and add them up.",
        traps={0: "The shares add up to 1, but the whole numbers do not add up to 1797.", 1: "Add up the three."},
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
    ),
    "08/dealt": Question(
        answer=lambda size: math.ceil(1258 / size) * size,
        why="every rank gets the same number, so some images are used twice if the division has a remainder.",
        hint="All ranks get the same number, and no image is left out: round 1258 up to a multiple of the world size.",
        traps=lambda size: {1258 // size * size: "That is the number with drop_last=True."} if 1258 % size else {},
    ),
    "08/uneven": Question(
        answer=True,
        why="each rank's mean counts by its number of images, and so the sum is the mean over all of them.",
        hint="Multiply the gradient by this rank's number of images, add up gradients and numbers over the ranks, and "
        "divide one by the other.",
    ),
}
