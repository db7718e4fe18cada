"""Questions of lesson 09: DDP from the inside, and DataParallel."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "09/first-bucket": Question(
        answer="last",
        why="backward begins at the last layer, so its gradients are ready first, and their bucket is sent first.",
        hint="Which layer's gradients does autograd compute first?",
        traps={"first": "The backward reaches the first layer last."},
    ),
    "09/slow-link": Question(
        answer="fp16",
        why="on a slow link the time depends on the bytes: half the bytes take half the time, with any bucket size.",
        hint="Small buckets hide communication behind the backward, but only as long as the backward lasts.",
        traps={
            "small buckets": "They hide only as much as the backward takes, which is short compared to the transfer."
        },
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
            0: "The last pass has to synchronise, or every rank steps with its own gradient.",
        },
    ),
}
