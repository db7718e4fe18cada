"""Questions of lesson 05: point to point."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "05/who-waits": Question(
        answer="sender",
        why="send of gloo returns when the receiver has taken the data, so rank 0 waited for rank 1.",
        hint="Look at the seconds: one of the two had nothing to do until the other came.",
        traps={"receiver": "The receiver started last, so it did not have to wait."},
    ),
    "05/changed": Question(
        answer=[100.0, 100.0],
        why="rank 1 received after rank 0 had changed the data, so it got the changed buffer.",
        hint="isend only notes where the data are. They are read when rank 1 is ready, and rank 0 had gone on by then.",
        traps={(0.0, 0.0): "That is what rank 0 wanted to send."},
    ),
    "05/first-comer": Question(
        answer=lambda size: size - 1,
        why="the last rank sleeps for the shortest time, so its message comes first.",
        hint="Rank 0 takes the first message. Which rank sleeps for the shortest time?",
    ),
    "05/tags": Question(
        answer=["second", "first"],
        why="the tag chooses the message, and not the order in which they were sent.",
        hint="recv takes the message whose tag it names, and the others wait.",
    ),
    "05/shift": Question(
        answer=lambda size: {rank: float((rank - 1) % size) for rank in range(size)},
        why="each rank has the number of its left neighbour, and rank 0 that of the last.",
        hint="Rank r sends to (r + 1) % world_size and receives from (r - 1) % world_size. Start both before you wait.",
    ),
}
