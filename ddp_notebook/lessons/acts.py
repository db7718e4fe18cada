"""What a lesson tells the browser, and what the browser may ask of it: plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.algorithms.stepping import Stepper
from ddp_notebook.lessons.collectives import theory
from ddp_notebook.lessons.collectives.explorer import Explorer
from ddp_notebook.lessons.messages.messages import STORIES, Scene


def state(lesson: Explorer | Stepper | Scene) -> dict[str, Any]:
    """All that is drawn of a lesson."""
    if isinstance(lesson, Explorer):
        return _of_explorer(lesson)
    if isinstance(lesson, Stepper):
        return _of_stepper(lesson)
    return _of_scene(lesson)


def act(lesson: Explorer | Stepper | Scene, wish: Mapping[str, Any]) -> None:
    """Do what a button wants.

    Raises:
        UsageError: it cannot be.
    """
    what = wish["do"]
    match lesson, what:
        case Explorer(), "configure":
            lesson.configure(**_options(wish))
        case Explorer(), "run":
            if (inputs := wish.get("inputs")) is not None:
                lesson.inputs = _by_rank(inputs)
            lesson.prediction = {}
            lesson.predict({r: v for r, v in _by_rank(wish.get("prediction") or {}).items() if r in lesson.call.ranks})
            lesson.run()
        case Explorer(), "wrong":
            lesson.wrong(wish["kind"], wish.get("rank"))
        case Stepper(), "configure":
            lesson.configure(**_options(wish))
        case Stepper(), "step":
            lesson.step()
        case Stepper(), "play":
            lesson.play()
        case Stepper(), "restart":
            lesson.restart()
        case Stepper(), "compare":
            lesson.compare()
        case Scene(), "play":
            lesson.play(wish.get("name"))


def _options(wish: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(wish.get("options") or {})
    if options.get("inputs") is not None:
        options["inputs"] = _by_rank(options["inputs"])
    return options


def _by_rank(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(rank): given for rank, given in values.items()}


def _of_explorer(lesson: Explorer) -> dict[str, Any]:
    call, happened = lesson.call, lesson.happened
    specified = lesson.expected()
    who = theory.contributors(call)
    return {
        "kind": "collective",
        "world_size": call.world_size,
        "op": call.op,
        "reduce_op": call.reduce_op,
        "root": call.root,
        "peer": call.peer,
        "group": call.ranks,
        "dtype": call.dtype,
        "sizes": call.sizes,
        "ops": theory.OPS,
        "dtypes": theory.DTYPES,
        "reduce_ops": theory.legal_reduce_ops(call.dtype),
        "reduces": call.op in theory.REDUCING,
        "rooted": call.op in theory.ROOTED,
        "messages": call.op in theory.POINT_TO_POINT,
        "uneven": call.op in theory.MAY_BE_UNEVEN,
        "wrong": lesson.kinds_of_wrong,
        "actors": call.actors,
        "line": lesson.line,
        "formula": lesson.formula,
        "inputs": lesson.inputs,
        "in_chunks": {rank: _in_chunks(call, rank) for rank in call.ranks},
        "out_chunks": {rank: _out_chunks(call, rank, len(who[rank])) for rank in who},
        "who": who,
        "specified": sorted(specified),
        "prediction": lesson.prediction,
        "result": lesson.result,
        "right": None if lesson.result is None else lesson.right,
        "agrees": None if lesson.result is None else lesson.agrees,
        "happened": None
        if happened is None
        else {
            "kind": happened.kind,
            "rank": happened.rank,
            "code": happened.code,
            "error": happened.error,
            "message": happened.message,
            "by_rank": happened.by_rank,
            "values": happened.values,
            "seconds": happened.seconds,
        },
    }


def _in_chunks(call: theory.Call, rank: int) -> list[tuple[str, int]]:
    """The rows of a rank's input: a name and how many elements."""
    n = call.input_size(rank)
    if call.op in theory.CHUNKED and n:
        return [(f"for {to}", size) for to, size in zip(call.ranks, call.chunk_sizes, strict=True)]
    return [("", n)] if n else []


def _out_chunks(call: theory.Call, rank: int, n: int) -> list[tuple[str, int]]:
    if n and call.op in ("gather", "all_gather"):
        return [(f"from {source}", call.sizes[0]) for source in call.ranks]
    if call.op == "all_to_all":
        size = call.chunk_sizes[call.ranks.index(rank)]
        return [(f"from {source}", size) for source in call.ranks]
    return [("", n)] if n else []


def _of_stepper(lesson: Stepper) -> dict[str, Any]:
    n = lesson.world_size
    compared = lesson.compared
    return {
        "kind": "algorithm",
        "world_size": n,
        "name": lesson.name,
        "names": plans.ALGORITHMS,
        "steps": lesson.steps,
        "taken": lesson.taken,
        "sizes": lesson.sizes,
        "elements": lesson.elements,
        "nbytes": lesson.nbytes,
        "dtype": lesson.dtype,
        "rules": [plans.rule(lesson.name, n, step) for step in range(lesson.steps)],
        "states": [
            {
                "moves": one.moves,
                "chunks": one.chunks,
                "who": one.who,
                "links": [(src, dst, nbytes) for (src, dst), nbytes in one.bytes_moved.items()],
            }
            for one in lesson.states
        ],
        "theory": [(src, dst, nbytes) for (src, dst), nbytes in lesson.theory().items()],
        "real_line": lesson.real_line,
        "agrees": compared,
    }


def _of_scene(lesson: Scene) -> dict[str, Any]:
    return {
        "kind": "messages",
        "world_size": lesson.world_size,
        "name": lesson.name,
        "stories": [(name, story.title) for name, story in STORIES.items()],
        "title": lesson.story.title,
        "lesson": lesson.story.lesson,
        "code": lesson.story.code,
        "events": [
            {
                "rank": event.rank,
                "what": event.what,
                "peer": event.peer,
                "tag": event.tag,
                "nbytes": event.nbytes,
                "start": event.start_ms,
                "end": event.end_ms,
                "blocked": event.blocked_ms,
                "over": event.is_over,
            }
            for event in lesson.events
        ],
        "arrows": lesson.arrows,
        "said": lesson.said,
        "message": lesson.error,
        "strip": lesson.values.get(1) if lesson.changed is not None else None,
    }
