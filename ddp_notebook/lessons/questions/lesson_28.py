"""Questions of lesson 28: plan it."""

from __future__ import annotations

from ddp_notebook.lessons.capstones.measures import TOKENS_PER_S
from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "28/bytes": Question(
        answer=1129,
        why="16 bytes times 70.55 billion are 1,129 GB: more than one node has.",
        hint="Add up the table: how many bytes for each parameter?",
        traps={
            141: "Those are the parameters in bfloat16 alone.",
            282: "Those are parameters and gradients in bfloat16. The optimizer needs three times as much.",
            564: "Those are parameters and two averages of Adam; the table has five numbers.",
        },
        choices={"141 GB": 141, "282 GB": 282, "564 GB": 564, "1,129 GB": 1129},
    ),
    "28/fsdp": Question(
        answer="no",
        why="the shards take 71 GB. Whole layers, activations and logits are not divided by shards, and need 30 GB "
        "more.",
        hint="What does a GPU hold besides its shard?",
        traps={"yes": "1,129 GB / 16 = 71 GB fit, but this is only the state of the model."},
        choices=("yes", "no"),
    ),
    "28/tensor": Question(
        answer="over 16",
        why="each GPU then takes part in the all-reduces of all sequences, and not of half of them.",
        hint="How many sequences does one GPU handle in a step, with 8 and with 16?",
        traps={"the same": "The bytes of one all-reduce are nearly the same. But how many does a GPU make?"},
        choices=("over 8", "over 16", "the same"),
    ),
    "28/bubble": Question(
        answer=1 / 128,
        why="(2 - 1) / 128: with many microbatches a bubble is small.",
        hint="(p - 1) / m, with two stages and 128 microbatches.",
        traps={0.5: "That is the idle share of a step with a single microbatch: (p - 1) / (m + p - 1) with m = 1."},
        choices={"0.8 %": 1 / 128, "1.6 %": 2 / 128, "50 %": 0.5},
        tolerance=0.01,
    ),
    "28/hsdp": Question(
        answer="memory",
        why="each replica keeps the whole state on eight GPUs: 141 GB for each GPU.",
        hint="Over how many GPUs is the state of the model divided?",
        traps={
            "time": "Its communication is cheap: the gradients of a shard cross the nodes once in a step.",
            "nothing": "HSDP is a good plan for a model whose state fits into one node.",
        },
        choices=("memory", "time", "nothing"),
    ),
    "28/microbatch": Question(
        answer="parameters, gradients, Adam",
        why="the state of the model does not depend on the batch. Activations and logits grow with it.",
        hint="Which formulas contain b?",
        choices=("parameters, gradients, Adam", "activations", "logits and their gradient"),
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "28/plan": Puzzle(
        setup="from ddp_notebook.lessons.capstones.ranks import try_plan",
        call="try_plan(solution())",
        wanted="True",
        targets=(Target(measure=TOKENS_PER_S, least=11_600),),
        why="the best plan of these formulas has 12,800 tokens per second. Did you find it?",
        hint="Which line of the time is large besides the computation?",
        wrong_hint="The plan does not fit. Look at the largest line of its memory that you can still divide.",
    ),
}
