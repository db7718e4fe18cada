"""Questions of lesson 17: checkpoints."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target
from ddp_notebook.lessons.questions.returned import returned
from ddp_notebook.records.units import size as in_bytes

QUESTIONS: dict[str, Question] = {
    "17/share": Question(
        answer=lambda size: 1 / size,
        why="state_dict() gives each rank its own part of every parameter, and only rank 0 has saved its part.",
        hint="Where are the other parts when rank 0 writes, and has rank 0 gathered them?",
        traps={1: "No rank has gathered it: rank 0 has only its own part.", 0: "Its own part is in the file."},
        placeholder="1 / 100",
    ),
    "17/async": Question(
        answer=30,
        why="async_save copies the state before it returns. Later steps do not change the copy.",
        hint="Does async_save copy the state before or after it returns?",
        traps={
            35: "The files are complete only then, but they are written from a copy.",
            "a mixture": "That would happen if the thread read the parameters while training changes them.",
        },
        choices={"30": 30, "35": 35, "a mixture of steps 30 to 35": "a mixture"},
    ),
    "17/seen-twice": Question(
        answer=20,
        why="it starts the epoch again, so the 5 batches of 4 samples before the interruption come again.",
        hint="With the same seed and epoch the order is the same. How many samples were in the first 5 batches?",
        traps={0: "The sampler does not know how far the other program came.", 5: "5 is the number of batches."},
        placeholder="7",
    ),
    "17/next-step": Question(
        answer=30,
        why="the part of the dead rank is in the checkpoint of step 30 only, and the others must not be ahead of it.",
        hint="Where is the dead rank's part of the model, and of which step?",
        traps={
            45: "The others have their parts of step 45, but the part of rank 1 is lost.",
            20: "A newer checkpoint exists.",
        },
        choices=(20, 30, 45, 46),
    ),
    "17/who": Question(
        answer={
            "torch.save of the parameters of a DDP model": "rank 0",
            "dcp.save of an FSDP model": "all",
            "get_model_state_dict with full_state_dict=True": "all",
            "writing the gathered state": "rank 0",
            "saving the state of the random number generator": "all",
        },
        why="rank 0 is enough for values that are equal on all ranks. Shards, collectives and own states need all "
        "ranks.",
        hint="Is the value equal on all ranks? Does the call communicate?",
    ),
    "17/size": Question(
        answer={"total": 84.0, "per rank": 10.5},
        why="4 bytes for the parameter and 8 for Adam: 12 bytes of 7 billion parameters, and each rank writes an "
        "eighth.",
        hint="Gradients are not saved. How many numbers per parameter remain?",
        tolerance=0.02,
    ),
    "17/to-the-bit": Question(
        answer={"next step": True, "the one after": True},
        why="the next steps depend only on the parameters, Adam's state and the state of the random number generator.",
        hint="Which objects does a step read or change? Each of them has a state.",
    ),
}

_BYTES = 3 * 4 * (512 * 512 + 512)  # the parameters, and the two averages of Adam

PUZZLES: dict[str, Puzzle] = {
    "17/small-files": Puzzle(
        setup="from ddp_notebook.lessons.questions.saving_ranks import tried",
        call="tried(solution)",
        got="result['is right']",
        wanted="1.0",
        targets=(Target(measure=returned("largest file", in_bytes), most=lambda size: 1.2 * _BYTES / size),),
        why="each rank writes its own parts into its own file.",
        hint="Which rank has which part before you gather the state? Let each rank write what it has.",
        wrong_hint="Save a dictionary with the keys model and optimizer, with dcp.save.",
    ),
}
