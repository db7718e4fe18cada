"""Lessons: what torch.distributed does, seen, stepped through and predicted, on the running ranks.

    from ddp_notebook import lessons

    lessons.collective("all_reduce")            predict, run on the ranks, compare
    lessons.algorithm("ring all_reduce")        one step at a time
    lessons.point_to_point("race")              who waits for whom, drawn as it happened
    lessons.cost()                              measured times, and the alpha-beta model
    lessons.places(nodes=2, per_node=4)         ranks, local ranks and nodes
    lessons.exchanges()                         what the last cell has sent, drawn as it was recorded
    lessons.rpc("calls")                        who runs what: predict, run, step through calls between ranks
    lessons.inside_ddp()                        a training step in DDP, in stages and at speed
    lessons.pipeline()                          a model cut over the ranks: schedules, microbatches, bubbles
    lessons.placement("model")                  which rank holds which part
    lessons.product("Shard(1)", "Shard(0)")     A @ B in pieces: which collective does it need?
    lessons.mesh(way="HSDP")                    who talks to whom in a training on a mesh
    lessons.check("04/world-size", 24)          was that right?

Every number comes from tensors on the ranks. Without a front end lessons work the same, and leave pictures.

    collectives/    what each collective does and costs
    algorithms/     algorithms made of sends and receives, step by step
    messages/       point to point
    remote/         calls to other ranks, and references
    ddp/            DDP from the inside
    pipelines/      a model cut over the ranks
    sharding/       tensors in pieces: who holds what, and what is sent for it
    questions/      exercises with a checked answer
    lesson_cells    how lessons use the running session
    ranks           what they run on the ranks
    lesson          what every lesson with a view has: its state, its acts, its picture
    lesson_widget   its JavaScript, what the browser draws, and what it requests
    lesson_display  how a lesson is displayed: a widget while ranks run, a picture and a text afterwards
    rank_columns    parts of pictures: a column for each rank, cells with values
    nodes           the picture of nodes, processes and their numbers
    js/             the lessons in the browser
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_notebook.lessons.algorithms.stepping import Stepper
    from ddp_notebook.lessons.collectives.costs import Costs
    from ddp_notebook.lessons.collectives.explorer import Explorer
    from ddp_notebook.lessons.ddp.inside import InsideDDP, inside_ddp
    from ddp_notebook.lessons.messages.point_to_point import Scene, point_to_point
    from ddp_notebook.lessons.messages.transfer_picture import exchanges
    from ddp_notebook.lessons.nodes import places
    from ddp_notebook.lessons.pipelines.pipeline import PipelineLesson, PipelineRun, pipeline
    from ddp_notebook.lessons.questions.questions import Verdict, check
    from ddp_notebook.lessons.remote.rpc import RemoteProgram
    from ddp_notebook.lessons.sharding.mesh_training import MeshTraining, mesh
    from ddp_notebook.lessons.sharding.placement_picture import placement
    from ddp_notebook.lessons.sharding.product import Product, product

__all__ = [
    "Costs",
    "Explorer",
    "InsideDDP",
    "MeshTraining",
    "PipelineLesson",
    "PipelineRun",
    "Product",
    "RemoteProgram",
    "Scene",
    "Stepper",
    "Verdict",
    "algorithm",
    "check",
    "collective",
    "cost",
    "exchanges",
    "inside_ddp",
    "mesh",
    "pipeline",
    "placement",
    "places",
    "point_to_point",
    "product",
    "rpc",
]

# Ranks import `lessons.ranks` and with it this file: they must not pay for the notebook's side.
_LAZY = {
    "Costs": "collectives.costs",
    "Explorer": "collectives.explorer",
    "InsideDDP": "ddp.inside",
    "MeshTraining": "sharding.mesh_training",
    "PipelineLesson": "pipelines.pipeline",
    "PipelineRun": "pipelines.pipeline",
    "Product": "sharding.product",
    "RemoteProgram": "remote.rpc",
    "Scene": "messages.point_to_point",
    "Stepper": "algorithms.stepping",
    "Verdict": "questions.questions",
    "check": "questions.questions",
    "exchanges": "messages.transfer_picture",
    "placement": "sharding.placement_picture",
    "places": "nodes",
    "inside_ddp": "ddp.inside",
    "mesh": "sharding.mesh_training",
    "pipeline": "pipelines.pipeline",
    "point_to_point": "messages.point_to_point",
    "product": "sharding.product",
    "rpc": "remote.rpc",
}


def collective(name: str = "all_reduce", *, op: str = "SUM", **options: Any) -> Explorer:
    """Explore one collective.

    Args:
        name: of the collective: "all_reduce", "send/recv", ...
        op: how it reduces, as torch calls it: "SUM", "MAX", ...
        options: further arguments of `Explorer`: inputs, root, peer, group, dtype, sizes.

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
    """Measure algorithms over sizes; see `lessons.collectives.costs.measure`."""
    from ddp_notebook.lessons.collectives.costs import measure

    return measure(**options)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
