"""Interactive lessons on torch.distributed, run on the running ranks.

    from ddp_notebook import lessons

    lessons.collective("all_reduce")            predict, run on the ranks, compare
    lessons.algorithm("ring all_reduce")        one step at a time
    lessons.point_to_point("race")              waits between ranks, drawn from the recording
    lessons.cost()                              measured times and the alpha-beta model
    lessons.places(nodes=2, per_node=4)         ranks, local ranks and nodes
    lessons.exchanges()                         the messages of the last cell, drawn from the recording
    lessons.rpc("calls")                        calls between ranks: predict, run, step through
    lessons.inside_ddp()                        a training step in DDP, in stages and at speed
    lessons.pipeline()                          a model cut over the ranks: schedules, microbatches, bubbles
    lessons.placement("model")                  the parts that each rank holds
    lessons.product("Shard(1)", "Shard(0)")     A @ B in pieces: predict the collective that it needs
    lessons.mesh(way="HSDP")                    communication of a training run on a mesh
    lessons.ask("05/changed")                   ask for a guess
    lessons.result("05/changed", figure)        display a result after the guess
    lessons.bug(1)                              a broken program to repair
    lessons.overlap("MyDDP")                    a step of your own DDP: hidden and exposed transfers
    lessons.plan(shard=16)                      memory and time of a step of a large model
    lessons.check("04/world-size", 24)          check an answer
    lessons.progress()                          the answers so far; also `collect` and `forget`

Every number comes from tensors on the ranks. Without a front end, lessons work too and show pictures.

    collectives/    results and costs of collectives
    algorithms/     algorithms made of sends and receives, step by step
    messages/       point to point
    remote/         calls to other ranks, and references
    ddp/            DDP from the inside
    pipelines/      a model cut over the ranks
    sharding/       tensors in pieces: the parts of each rank, and their communication
    questions/      questions before results, and exercises with a checked answer
    capstones/      larger tasks that use several lessons
    lesson_cells    runs the cells of a lesson in the session
    ranks           the code of the lessons on the ranks
    slow_backward   simulated computation of a backward pass on the ranks
    lesson          interface of a lesson with a view: state, acts, picture
    lesson_widget   the widget of a lesson, and requests of the browser
    lesson_display  displays a lesson: a widget while ranks run, a picture and a text afterwards
    rank_columns    parts of pictures: a column for each rank, cells with values
    language        sentences in the language of a translated notebook
    nodes           the picture of nodes, processes and their numbers
    js/             the lessons in the browser
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.lessons.algorithms.stepping import Stepper
    from ddp_notebook.lessons.capstones.bug import Bug
    from ddp_notebook.lessons.capstones.overlap import overlap
    from ddp_notebook.lessons.capstones.plan import Plan
    from ddp_notebook.lessons.collectives.costs import Costs
    from ddp_notebook.lessons.collectives.explorer import Explorer
    from ddp_notebook.lessons.ddp.inside import InsideDDP, inside_ddp
    from ddp_notebook.lessons.messages.point_to_point import Scene, point_to_point
    from ddp_notebook.lessons.messages.transfer_picture import exchanges
    from ddp_notebook.lessons.nodes import places
    from ddp_notebook.lessons.pipelines.pipeline import PipelineLesson, PipelineRun, pipeline
    from ddp_notebook.lessons.questions.asking import ask
    from ddp_notebook.lessons.questions.progress import collect, forget, progress
    from ddp_notebook.lessons.questions.questions import Verdict, check
    from ddp_notebook.lessons.questions.results import result
    from ddp_notebook.lessons.remote.rpc_program import RemoteProgram
    from ddp_notebook.lessons.sharding.mesh_training import MeshTraining, mesh
    from ddp_notebook.lessons.sharding.placement_picture import placement
    from ddp_notebook.lessons.sharding.product import Product, product

__all__ = [
    "Bug",
    "Costs",
    "Explorer",
    "InsideDDP",
    "MeshTraining",
    "PipelineLesson",
    "PipelineRun",
    "Plan",
    "Product",
    "RemoteProgram",
    "Scene",
    "Stepper",
    "Verdict",
    "algorithm",
    "ask",
    "bug",
    "check",
    "collect",
    "collective",
    "cost",
    "exchanges",
    "forget",
    "inside_ddp",
    "mesh",
    "overlap",
    "pipeline",
    "placement",
    "places",
    "plan",
    "point_to_point",
    "product",
    "progress",
    "result",
    "rpc",
]

# Ranks import `lessons.ranks` and thus this file, so it must not import the modules of the notebook.
_LAZY = {
    "Bug": "capstones.bug",
    "Costs": "collectives.costs",
    "Explorer": "collectives.explorer",
    "InsideDDP": "ddp.inside",
    "MeshTraining": "sharding.mesh_training",
    "PipelineLesson": "pipelines.pipeline",
    "PipelineRun": "pipelines.pipeline",
    "Plan": "capstones.plan",
    "Product": "sharding.product",
    "RemoteProgram": "remote.rpc_program",
    "Scene": "messages.point_to_point",
    "Stepper": "algorithms.stepping",
    "Verdict": "questions.questions",
    "ask": "questions.asking",
    "check": "questions.questions",
    "collect": "questions.progress",
    "forget": "questions.progress",
    "progress": "questions.progress",
    "result": "questions.results",
    "exchanges": "messages.transfer_picture",
    "placement": "sharding.placement_picture",
    "places": "nodes",
    "inside_ddp": "ddp.inside",
    "mesh": "sharding.mesh_training",
    "overlap": "capstones.overlap",
    "pipeline": "pipelines.pipeline",
    "point_to_point": "messages.point_to_point",
    "product": "sharding.product",
    "rpc": "remote.rpc_program",
}


def collective(name: str = "all_reduce", *, op: str = "SUM", **options: Any) -> Explorer:
    """Explore one collective.

    Args:
        name: Name of the collective: "all_reduce", "send/recv", ...
        op: Reduce operation, named as in torch: "SUM", "MAX", ...
        options: Further arguments of `Explorer`: inputs, root, peer, group, dtype, sizes.

    Example:
        >>> lessons.collective("all_reduce", op="MAX", inputs={0: [1, 5], 1: [4, 2]}).run()
        {0: array([4., 5.], dtype=float32), 1: array([4., 5.], dtype=float32)}
    """
    from ddp_notebook.lessons.collectives.explorer import Explorer

    return Explorer(name, op, **options)


def algorithm(name: str = "ring all_reduce", **options: Any) -> Stepper:
    """Step through an algorithm; see `Stepper`."""
    from ddp_notebook.lessons.algorithms.stepping import Stepper

    return Stepper(name, **options)


def cost(**options: Any) -> Costs:
    """Measure algorithms over several sizes; see `lessons.collectives.costs.measure`."""
    from ddp_notebook.lessons.collectives.costs import measure

    return measure(**options)


def bug(number: int) -> Bug:
    """Return a broken program of lesson 27; see `Bug`."""
    from ddp_notebook.lessons.capstones.bug import Bug

    return Bug(number)


def plan(**choice: Any) -> Plan:
    """Plan a training run of a large model; see `Plan`."""
    from ddp_notebook.lessons.capstones.plan import Plan

    return Plan(**choice)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
