"""What notebooks 16 to 18 ask, by name: the number of the notebook and a word."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS = {
    # ---- 16: the training loop
    "16/who-skips": Question(
        answer="all",
        why="the mean of gradients of which one is infinite is infinite, so every rank finds it in its own copy.",
        hint="What has every rank in its gradients when DDP's backward is over?",
        traps={"rank 1": "It would be so if each rank looked at the gradients of its own batch only."},
    ),
    "16/messages": Question(
        answer={"nothing": 4, "backward": 4, "forward and backward": 1},
        why="DDP decides in the forward whether the next backward sends, so the forward has to be inside too.",
        hint="When does DDP decide whether a backward is one that sends?",
    ),
    "16/times": Question(
        answer=8,
        why="there are as many weights as gradients, and they are sent once in 8 steps.",
        hint="How large are all weights together beside all gradients, and how often are they sent?",
        traps={4: "That is how often they meet.", 32: "DDP sends 32 times; how often does local SGD?"},
    ),
    "16/careful": Question(
        answer=lambda size: {
            rank: {"skipped": [3], "is finite": True, "is clipped": True, "has moved": True} for rank in range(size)
        },
        why="average first, so that all find what is infinite; unscale, so that the norm is the gradients' own; clip.",
        hint="Three calls, in this order: the mean over the ranks, unscale_, clip_grad_norm_. Whoever clips before "
        "unscale_ clips the scaled gradients, and hardly moves.",
    ),
    # ---- 17: checkpoints
    "17/share": Question(
        answer=lambda size: 1 / size,
        why="state_dict() gives each rank its own part of every parameter, and only rank 0 has saved its part.",
        hint="Where are the other parts when rank 0 writes, and has anybody asked for them?",
        traps={1: "Nobody has gathered it: rank 0 has its own part only.", 0: "Its own part is in it."},
    ),
    "17/next-step": Question(
        answer=30,
        why="the part of the dead rank is in the checkpoint of step 30 only, and the others must not be ahead of it.",
        hint="Who has the dead rank's part of the model, and of which step?",
        traps={
            45: "The others have their parts of step 45, and nobody has that of rank 1.",
            20: "There is a newer one.",
        },
    ),
    "17/to-the-bit": Question(
        answer={"next step": True, "the one after": True},
        why="parameters, Adam's state and the place in the random numbers are all that the next steps depend on.",
        hint="Which objects does a step change? Save the state of each: model, optimizer, generator of batches.",
    ),
    # ---- 18: a GPT
    "18/lower": Question(
        answer="theirs",
        why="each of their positions but the last can look at the character that it is to guess.",
        hint="Ask what a mask of 0.0 and 1.0 forbids when it is added to the scores.",
        traps={"ours": "A low loss is no sign of a good model."},
    ),
    "18/worst": Question(
        answer=31,
        why="the last position has no later one to copy from, and has learnt nothing else.",
        hint="Which position cannot see the character that it is to guess?",
        traps={0: "So it is in a model that sees the past only: the first position has the least to go by."},
    ),
    "18/second-attempt": Question(
        answer=40,
        why="snapshots were saved after 20 and after 40 steps, and what came later was in the memory of the dead.",
        hint="What is in the file when the rank dies after 53 steps?",
        traps={53: "The processes that knew of steps 40 to 52 are gone.", 0: "The script begins with what is saved."},
    ),
    "18/sees-future": Question(
        answer={"ours": False, "theirs": True, "one too far": True},
        why="another last character changes what earlier positions say only where they can see it.",
        hint="Call the model with two texts that differ in the last character, and compare all positions before it.",
    ),
}
