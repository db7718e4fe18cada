"""Questions of lesson 17: checkpoints."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "17/share": Question(
        answer=lambda size: 1 / size,
        why="state_dict() gives each rank its own part of every parameter, and only rank 0 has saved its part.",
        hint="Where are the other parts when rank 0 writes, and has rank 0 gathered them?",
        traps={1: "No rank has gathered it: rank 0 has only its own part.", 0: "Its own part is in the file."},
    ),
    "17/next-step": Question(
        answer=30,
        why="the part of the dead rank is in the checkpoint of step 30 only, and the others must not be ahead of it.",
        hint="Where is the dead rank's part of the model, and of which step?",
        traps={
            45: "The others have their parts of step 45, but the part of rank 1 is lost.",
            20: "A newer checkpoint exists.",
        },
    ),
    "17/to-the-bit": Question(
        answer={"next step": True, "the one after": True},
        why="the next steps depend only on the parameters, Adam's state and the state of the random number generator.",
        hint="Which objects does a step change? Save the state of each: model, optimizer, generator of batches.",
    ),
}
