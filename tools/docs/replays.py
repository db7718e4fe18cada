"""Data of the interactive pages: recorded lessons on four ranks, and a training run of 64 simulated ranks.

A lesson draws its `state()` and sends requests to `act(wish)`. Here, all requests that its view can send are run once
on real ranks, and the states are saved. In the browser, docs/replay.js answers with these states.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import ddp_notebook
from ddp_notebook import lessons
from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.collectives import theory
from ddp_notebook.lessons.lesson import Lesson
from ddp_notebook.lessons.lesson_widget import BUNDLE, LessonView
from ddp_notebook.lessons.sharding.mesh_training import CHOICES as OF_MESH
from ddp_notebook.lessons.sharding.mesh_training import WAYS
from ddp_notebook.lessons.sharding.product import CHOICES as OF_PRODUCT
from ddp_notebook.lessons.sharding.product import PLACEMENTS
from ddp_notebook.widgets import simulate
from tools.docs import fresh

WORLD_SIZE = 4
_DOCS = fresh.ROOT / "docs"
SCRIPTS = ("replay.js", "lessons.js")  # in that folder: parts of the script that `script` creates
_WRONG_ON_ALL = "all_reduce"  # for other collectives only the last rank is wrong: each hang takes two seconds


def record_all(folder: Path, *, keep_old: bool = False) -> None:
    """Record the lessons into lessons.json, if it is out of date.

    Args:
        folder: Output folder.
        keep_old: Keep an existing recording even if it is out of date.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = fresh.key_of(Path(__file__).read_bytes())
    tapes = folder / "lessons.json"
    if fresh.is_made([tapes], key) or (keep_old and tapes.is_file()):
        return
    began_s = time.monotonic()
    with ddp_notebook.start(WORLD_SIZE, backend="gloo", guard=True) as session:
        found = {
            "collective": _collectives(session),
            "algorithm": _algorithms(session),
            "messages": _scenes(session),
            "product": _products(session),
            "mesh": _meshes(session),
        }
    tapes.write_text(json.dumps(found, separators=(",", ":")))
    fresh.set_made(tapes, key)
    print(f"recorded the lessons on {WORLD_SIZE} ranks in {time.monotonic() - began_s:.0f} s", flush=True)


def _collectives(session: ddp_notebook.Session) -> dict[str, Any]:
    """Record each collective with each root and each reduce operation, and the wrong calls of one rank."""
    states, happened = [], {}
    ranks = range(session.world_size)
    for op in theory.OPS:
        reduce_ops = theory.legal_reduce_ops("float32") if op in theory.REDUCING else ("SUM",)
        roots = ranks if op in theory.ROOTED else (0,)
        for root, reduce_op in product(roots, reduce_ops):
            peers = [rank for rank in ranks if rank != root] if op in theory.POINT_TO_POINT else [None]
            for peer in peers:
                explorer = lessons.Explorer(op, reduce_op, root=root, peer=peer, session=session)
                explorer.run()
                states.append({**_state(explorer), "dtypes": ["float32"]})
    for op in theory.OPS:
        explorer = lessons.Explorer(op, session=session)
        actors = explorer.call.actors
        for kind, rank in product(explorer.kinds_of_wrong, actors if op == _WRONG_ON_ALL else actors[-1:]):
            explorer.wrong(kind, rank)
            happened[f"{explorer.line} {kind} {rank}"] = _state(explorer)["happened"]
    return {"first": "all_reduce", "states": states, "happened": happened}


def _algorithms(session: ddp_notebook.Session) -> dict[str, Any]:
    """Record each algorithm with all its steps, compared with the torch.distributed call."""
    states = {}
    for name in plans.ALGORITHMS:
        stepper = lessons.Stepper(name, session=session)
        stepper.compare()
        states[name] = _state(stepper)
    return {"first": plans.ALGORITHMS[0], "states": states}


def _scenes(session: ddp_notebook.Session) -> dict[str, Any]:
    """Record each scene of sends and receives."""
    scene = lessons.Scene(session=session)
    states = {}
    for name, _ in _state(scene)["stories"]:
        scene.play(name)
        states[name] = _state(scene)
    return {"first": "blocking", "states": states}


def _products(session: ddp_notebook.Session) -> dict[str, Any]:
    """Record the product of two matrices with all placements of both."""
    lesson, states = lessons.product(session=session), {}
    first = f"{lesson.of_a} {lesson.of_b}"
    for of_a, of_b in product(PLACEMENTS, repeat=2):
        lesson.configure(of_a=of_a, of_b=of_b)
        states[f"{of_a} {of_b}"] = _with_each_guess(lesson, OF_PRODUCT)
    return {"first": first, "states": states}


def _meshes(session: ddp_notebook.Session) -> dict[str, Any]:
    """Record each training on each mesh: with one batch per row, and with different batches if that is wrong."""
    lesson, states = lessons.mesh(session=session), {}
    first = f"{lesson.way} {lesson.rows} false"
    for way, rows, is_by_rank in product(WAYS, lesson.state()["heights"], (False, True)):
        lesson.configure(way=way, rows=rows, is_by_rank=is_by_rank)
        if lesson.is_by_rank == is_by_rank:
            states[f"{way} {rows} {json.dumps(is_by_rank)}"] = _with_each_guess(lesson, OF_MESH)
    return {"first": first, "states": states}


def _with_each_guess(lesson: lessons.Product | lessons.MeshTraining, choices: Sequence[str]) -> dict[str, Any]:
    """Record a lesson before and after a run without a guess, and the differences for each guess."""
    before, guesses = _state(lesson), {}
    lesson.run()
    after = _state(lesson)
    for choice in choices:
        now = _state(lesson.guess(choice))
        guesses[choice] = {name: value for name, value in now.items() if value != after[name]}
    return {"before": before, "after": after, "guesses": guesses}


def write_pages(folder: Path) -> None:
    """Write the monitor of the recorded training run and of a simulated one: training.html and simulated.html."""
    ddp_notebook.load(folder / "training.npz").save_html(folder / "training.html")
    simulate(world_size=64, steps=40).save_html(folder / "simulated.html")


def _state(lesson: Lesson) -> dict[str, Any]:
    """Return the state that the browser gets from a lesson."""
    view = LessonView(lesson)
    view.close()
    return dict(view.state)


def script(folder: Path) -> str:
    """Return the script that shows the recorded lessons.

    A page that was opened from a folder cannot import modules, so the script contains them as text.
    """
    replay, begin = ((_DOCS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "LESSONS": json.dumps(BUNDLE.read_text(encoding="utf-8")),
        "REPLAY": json.dumps(replay),
        "TAPES": (folder / "lessons.json").read_text(),
    }
    lines = [f"const {name} = {value};" for name, value in parts.items()]
    return "\n".join(["{", *lines, begin, "}\n"])
