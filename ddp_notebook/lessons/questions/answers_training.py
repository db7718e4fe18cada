"""What notebooks 08 and 09 ask, by name: the number of the notebook and a word."""

from __future__ import annotations

import math

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS = {
    # ---- 08: distributed SGD by hand
    "08/lost": Question(
        answer=2,
        why="1257 + 359 + 179 is 1795: int() cuts off 0.9, 0.4 and 0.7 of an image, and two images belong to nobody.",
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
        why="what is linear in the gradient can be averaged before or after; Adam is not linear, and a mean that comes "
        "before the step does not bring the ranks together.",
        hint="Write one step as w - lr * g, and ask whether the mean over the ranks may be taken inside or outside.",
    ),
    "08/dealt": Question(
        answer=lambda size: math.ceil(1258 / size) * size,
        why="every rank gets as many as the others, so some images are dealt twice where it does not come out even.",
        hint="All ranks get equally many, and nobody goes short: round 1258 up to the next multiple of the world size.",
        traps=lambda size: {1258 // size * size: "That is what it deals with drop_last=True."} if 1258 % size else {},
    ),
    "08/uneven": Question(
        answer=True,
        why="each rank's mean counts by its number of images, and so the sum is the mean over all of them.",
        hint="Multiply the gradient by this rank's number of images, add up gradients and numbers over the ranks, and "
        "divide one by the other.",
    ),
    # ---- 09: DDP from the inside, and DataParallel
    "09/first-bucket": Question(
        answer="last",
        why="backward begins at the last layer, so its gradients are ready first, and their bucket is sent first.",
        hint="Which layer's gradients does autograd compute first?",
        traps={"first": "The first layer is the last that backward comes to."},
    ),
    "09/slow-link": Question(
        answer="fp16",
        why="where the link is slow the bytes take the time: half of them take half of it, in buckets of any size.",
        hint="Small buckets hide communication behind the backward, but only as long as the backward lasts.",
        traps={"small buckets": "They can hide no more than the backward lasts, and it is short beside the transfer."},
    ),
    "09/default-device": Question(
        answer={
            "parameters": False,
            "gradients": False,
            "optimizer state": True,
            "activations": False,
            "whole batch": True,
            "gathered outputs": True,
        },
        why="the update is made there, the loss too, and the batch begins there.",
        hint="Follow one step: where does the batch begin, where do the outputs come together, who makes the update?",
    ),
    "09/accumulate": Question(
        answer=1,
        why="three passes only added to the gradients of their rank, and the fourth sent the sum.",
        hint="Put forward and backward of the first three passes under `with model.no_sync():`.",
        traps={
            4: "Every pass synchronises still.",
            "another gradient": "It sends once, but the gradient is not the mean over all four.",
            0: "The last pass has to synchronise, or every rank steps with a gradient of its own.",
        },
    ),
}
