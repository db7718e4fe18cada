"""Questions of lesson 19: elastic training."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target
from ddp_notebook.lessons.questions.returned import returned

QUESTIONS: dict[str, Question] = {
    "19/next-step": Question(
        answer=50,
        why="the checkpoint was saved after 50 steps, 0 to 49; later steps were only in the memory of the dead rank.",
        hint="New processes have only the state in the file, which is written after every 50 steps.",
        traps={
            65: "That would be right if a process had kept steps 50 to 64.",
            0: "The script starts from the saved state.",
        },
        choices=(0, 50, 64, 65),
    ),
    "19/who-restarts": Question(
        answer=2,
        why="a group with a dead member is of no use, so the agent ends the other worker too and starts both.",
        hint="Ask whether the healthy worker can continue with its group.",
        traps={1: "The other worker's group has a dead member, and it cannot get another one."},
        choices=(1, 2, 3),
    ),
    "19/joined": Question(
        answer=3,
        why="the new group is made of new processes only: the one that trained was ended and started again.",
        hint="A process group cannot grow, and an agent gives a running worker no new one.",
        traps={2: "The worker that trained had a group of one, and a group cannot grow."},
        choices=(2, 3),
    ),
    "19/survive": Question(
        answer={"new processes": 1, "steps again": 0},
        why="the dead rank got a new process and its state from the other ranks, which stayed at their step.",
        hint="Which rank has died, and which ranks still have the state?",
        placeholder="5",
    ),
    "19/young": Question(
        answer=1138.4,
        why="sqrt(2 * 30 * 21600) = 1138 seconds: every 19 minutes.",
        hint="sqrt(2 * c * m) with c and m in seconds: 6 hours are 21,600 seconds.",
        traps={18.97: "That is the number of minutes."},
        tolerance=0.01,
    ),
    "19/cost": Question(
        answer=110,
        why="60 seconds for the restart, and on average half of 200 steps again: 100 steps of 0.5 seconds.",
        hint="A fault comes on average in the middle between two checkpoints.",
        traps={160: "That is the worst case: the fault comes just before a checkpoint."},
        tolerance=0.01,
    ),
    "19/images": Question(
        answer={"images": {0: 640, 1: 640}, "new processes": 1, "few repeated steps": True},
        why="80 steps of 8 images on each rank, one new process, and at most the interrupted step is repeated.",
        hint="A step is repeated after the fault. Which objects does survive() restore before that, and where "
        "must you count so that it restores the count too?",
    ),
}

_UNRELIABLE = """
import random


class Machine:
    '''Simulates a training run: a step takes 1 second, a save 3, a restart 10, with a fault every 100 s on average.'''

    def __init__(self):
        self.step, self.saved, self.seconds = 0, 0, 0.0
        self._chance = random.Random(7)
        self._fault_s = self._chance.expovariate(1 / 100)

    def train(self):
        '''Make a step. Returns whether it is complete; if not, a process has died.'''
        self.seconds += 1
        if self.seconds < self._fault_s:
            self.step += 1
            return True
        return False

    def save(self):
        self.seconds += 3
        self.saved = self.step

    def restart(self):
        '''Start new processes, with the state that was saved last.'''
        self.seconds += 10
        self.step = self.saved
        self._fault_s = self.seconds + self._chance.expovariate(1 / 100)


def trained(solution):
    machine = Machine()
    solution(machine, 2000)
    return {"seconds": machine.seconds, "steps": float(machine.step)}
"""

PUZZLES: dict[str, Puzzle] = {
    "19/save-in-time": Puzzle(
        setup=_UNRELIABLE,
        call="trained(solution)",
        got="result['steps']",
        wanted="2000.0",
        targets=(Target(measure=returned("seconds"), most=3100),),
        why="sqrt(2 * 3 * 100) is 24 seconds between two saves.",
        hint="A save takes 3 seconds, and a fault comes every 100 seconds on average. Use sqrt(2 * c * m).",
        wrong_hint="Train until machine.step is the number of steps. After a fault, restart.",
    ),
}
