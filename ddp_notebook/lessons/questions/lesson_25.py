"""Questions of lesson 25: build DDP."""

from __future__ import annotations

from ddp_notebook.lessons.capstones.measures import EXPOSED
from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "25/link": Question(
        answer=53,
        why="528 kB at 10 MB/s take 53 ms, without the cost of the calls.",
        hint="Divide the bytes by the speed of the link.",
        traps={
            5: "10 MB/s are 10 kB in a millisecond.",
            106: "That counts the bytes twice. With two ranks, each sends 2 (N - 1) / N = 1 times the bytes.",
        },
        choices={"5 ms": 5, "53 ms": 53, "106 ms": 106},
    ),
    "25/naive": Question(
        answer=101,
        why="53 ms for the bytes, and 16 calls of 3 ms. A busy machine needs longer.",
        hint="Bytes and calls: which part of both is hidden behind the backward?",
        traps={
            53: "Those are the bytes. There are 16 calls as well.",
            37: "Nothing runs at the same time: the first call begins when the backward is over.",
        },
        choices={"about 37 ms": 37, "about 53 ms": 53, "about 101 ms": 101},
    ),
    "25/flat": Question(
        answer=45,
        why="15 calls fewer, of 3 ms each. The bytes are the same.",
        hint="What is the same as before, and what changes?",
        traps={
            0: "The bytes are the same, but there are 16 calls before and one now.",
            53: "The bytes have to be sent still.",
        },
        choices={"nothing": 0, "about 45 ms": 45, "about 53 ms": 53},
    ),
    "25/first": Question(
        answer="last layer",
        why="the backward begins at the loss, so the last layer comes first. Its transfer is hidden behind seven "
        "layers.",
        hint="Where does the backward begin?",
        traps={
            "first layer": "Its gradient needs the gradients of all layers after it.",
            "all at once": "Autograd completes them one after the other.",
        },
        choices=("first layer", "last layer", "all at once"),
    ),
    "25/order": Question(
        answer="all ranks have the same graph",
        why="autograd completes the gradients in the same order on all ranks, as long as they run the same "
        "operations. A rank "
        "that uses other layers breaks it.",
        hint="What decides in which order autograd calls the hooks?",
        traps={
            "the link sorts them": "It sends them in the order in which they come.",
            "the hooks wait for each other": "A hook returns at once.",
        },
        choices=("the link sorts them", "all ranks have the same graph", "the hooks wait for each other"),
    ),
    "25/bits": Question(
        answer="not for sure",
        why="a + b = b + a, but (a + b) + c may differ from a + (b + c) by rounding. The order of the sum depends on "
        "the place of "
        "an element in its tensor.",
        hint="Is the addition of floating-point numbers associative?",
        traps={
            "yes": "With two ranks every order gives the same sum. With three, rounding depends on the order.",
            "no, never": "Many elements are equal, and with luck all are.",
        },
        choices=("yes", "not for sure", "no, never"),
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "25/overlap": Puzzle(
        setup="from ddp_notebook.lessons.capstones.ranks import train_with, train_with_ddp",
        call="train_with(solution)",
        got="[bool((ours == theirs).all()) for ours, theirs in zip(result, train_with_ddp())]",
        wanted="[True] * len(result)",
        # Without overlap it cannot be below 1. With one call for each gradient it is about 0.9, since calls cost time.
        targets=(Target(measure=EXPOSED, most=0.7),),
        why="full buckets leave while the backward goes on, and only the last one is exposed.",
        hint="Begin to send during the backward, and send few and large tensors.",
        wrong_hint="The weights must have the same bits as with DDP of torch.",
    ),
}
