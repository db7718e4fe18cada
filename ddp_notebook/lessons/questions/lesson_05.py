"""Questions of lesson 05: point to point."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENDS
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "05/who-waits": Question(
        answer="sender",
        why="send of gloo returns when the receiver has taken the data, so rank 0 waited for rank 1.",
        hint="Look at the seconds: one of the two had nothing to do until the other came.",
        traps={
            "receiver": "The receiver started last, so it did not have to wait.",
            "nobody": "Some libraries copy a small message and let send return at once. gloo does not.",
        },
        choices={"the sender, rank 0": "sender", "the receiver, rank 1": "receiver", "no rank": "nobody"},
    ),
    "05/total": Question(
        answer=0.5,
        why="the work of 0.3 s lies within the 0.5 s in which the message waited for its receiver.",
        hint="The message waits from the call of isend on. Does rank 0 have to finish its work before that?",
        traps={
            0.8: "That would be the time if the message could not wait while rank 0 works.",
            0.3: "wait() returns when the receiver has taken the message, and that is after 0.5 s.",
        },
        choices={"0.3 s": 0.3, "0.5 s": 0.5, "0.8 s": 0.8},
    ),
    "05/changed": Question(
        answer=[100.0, 100.0],
        why="rank 1 received after rank 0 had changed the data, so it got the changed buffer.",
        hint="isend only notes where the data are. They are read when rank 1 is ready, and rank 0 had gone on by then.",
        traps={(0.0, 0.0): "That is what rank 0 wanted to send."},
        placeholder="[1, 2]",
    ),
    "05/first-comer": Question(
        answer="last",
        why="the last rank sleeps for the shortest time, so its message comes first.",
        hint="Rank 0 takes the first message. Which rank sleeps for the shortest time?",
        traps={
            "first": "Without src, the order of the ranks does not count.",
            "own": "A rank can not send to itself here. It receives from the others.",
        },
        choices={"of rank 1": "first", "of the last rank": "last", "of rank 0 itself": "own"},
    ),
    "05/tags": Question(
        answer=[1.0, 2.0],
        why="the tag chooses the message, and not the order in which they were sent.",
        hint="recv takes the message whose tag it names, and the others wait.",
        traps={(2.0, 1.0): "That would be right without tags: rank 1 fills `second` first."},
        choices={"1 and 2": [1.0, 2.0], "2 and 1": [2.0, 1.0]},
    ),
    "05/circle": Question(
        answer="wait",
        why="each send waits for the recv of its right neighbour, which is still in its own send.",
        hint="When does the send of rank 0 return? What does rank 1 do before it calls recv?",
        traps={
            "fine": "That is right only if the library copies the message, so that send can return at once.",
            "error": "No call is wrong by itself, so no library reports an error.",
        },
        choices={
            "every rank gets its number": "fine",
            "all ranks wait for each other": "wait",
            "an error on every rank": "error",
        },
    ),
    "05/shift": Question(
        answer=lambda size: {rank: float((rank - 1) % size) for rank in range(size)},
        why="each rank has the number of its left neighbour, and rank 0 that of the last.",
        hint="Which rank is to the right of the last rank? And which call returns before the other rank has received?",
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "05/everyone": Puzzle(
        setup="post = dist.new_group(backend='gloo')\nnumber = float(10 + rank * rank)",
        call="solution(number)",
        got="[float(one) for one in result or []]",
        wanted="[float(10 + one * one) for one in range(world_size)]",
        targets=(Target(measure=SENDS, most=2), Target(measure=COLLECTIVES, most=0)),
        why="a message may carry more than one number: it is the number of messages that counts here.",
        hint="Let a message carry the numbers of several ranks. Pass a growing list along the ranks, and send it back.",
        wrong_hint="Return a list with the number of rank 0 first, then that of rank 1, and so on.",
    ),
}
