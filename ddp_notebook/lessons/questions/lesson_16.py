"""Questions of lesson 16: the training loop."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "16/who-skips": Question(
        answer="all",
        why="the mean of gradients of which one is infinite is infinite, so every rank finds it in its own copy.",
        hint="Which gradients does every rank have after the backward of DDP?",
        traps={"rank 1": "That would be right if each rank checked the gradients of its own batch only."},
    ),
    "16/messages": Question(
        answer={"nothing": 4, "backward": 4, "forward and backward": 1},
        why="DDP decides in the forward whether the next backward sends, so the forward has to be inside too.",
        hint="When does DDP decide whether a backward is one that sends?",
    ),
    "16/times": Question(
        answer=8,
        why="there are as many weights as gradients, and they are sent once in 8 steps.",
        hint="Compare the size of all weights with the size of all gradients. How often are they sent?",
        traps={4: "That is how often they meet.", 32: "DDP sends 32 times; how often does local SGD?"},
    ),
    "16/careful": Question(
        answer=lambda size: {
            rank: {"skipped": [3], "is finite": True, "is clipped": True, "has moved": True} for rank in range(size)
        },
        why="average first, so that all ranks find the infinity; unscale, so that the norm is right; then clip.",
        hint="Three calls, in this order: the mean over the ranks, unscale_, clip_grad_norm_. Clipping before "
        "unscale_ clips the scaled gradients, and the step is far too small.",
    ),
}
