"""Questions of lesson 15: meshes."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import Attempt, Measure, sent_bytes
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target
from ddp_notebook.records.units import size as in_bytes


def _shape(size: int) -> tuple[int, int]:
    """Return rows and columns of the mesh that the notebook creates from the ranks."""
    rows = 2 if size >= 4 and size % 2 == 0 else 1
    return rows, size // rows


QUESTIONS: dict[str, Question] = {
    "15/row": Question(
        answer=lambda size: list(range(_shape(size)[1])),
        why="the first row is filled before the second one begins.",
        hint="Place the ranks row by row, and look at the position of rank 1.",
        traps={(1, 3): "That is its column: the ranks below it, not in its row."},
        placeholder="[5, 6]",
    ),
    "15/ways": Question(
        answer={"all-gather": "row", "reduce-scatter": "row", "average": "column"},
        why="a row holds the whole model once, so a layer is put together there; the copies are the other rows.",
        hint="Where are the parts of one copy of the model? All-gather and reduce-scatter go along this direction. The "
        "copies lie in the other direction.",
        choices=("row", "column"),
    ),
    "15/share": Question(
        answer=lambda size: 1 / size,
        why="the row divides the matrix, and the column divides each piece: all ranks together hold it once.",
        hint="Divide by the number of ranks in a row, and that once more by the number of ranks in a column.",
        traps=lambda size: (
            {1 / _shape(size)[1]: "That is a piece; FSDP has sharded it once more."} if _shape(size)[0] > 1 else {}
        ),
        tolerance=0.05,  # if the sizes are not divisible
        placeholder="1 / 100",
    ),
    "15/complaint": Question(
        answer=False,
        why="all shapes fit, and nothing in torch compares the inputs of the ranks that share a matrix.",
        hint="What could notice it? Every message has the right size.",
        choices={"an error": True, "no error": False},
    ),
    "15/shape": Question(
        answer=(2, 4),
        why="two rows, a machine each, and the four GPUs of a machine in a row.",
        hint="The ranks of one machine have consecutive numbers, and so do the ranks of a row.",
        traps={(4, 2): "Then a row has two GPUs, and half of the columns lead to the other machine."},
    ),
    "15/three": Question(
        answer={"pipeline": [1, 5], "data": [5, 7], "tensor": [4, 5]},
        why="rank 5 has the position (1, 0, 1). Along a dimension only its number changes.",
        hint="Write 5 as a binary number: its three digits are the position. Change one digit for each dimension.",
    ),
    "15/coordinates": Question(
        answer=lambda size: {rank: divmod(rank, _shape(size)[1]) for rank in range(size)},
        why="the row is the number of whole rows before the rank, the column is the remainder.",
        hint="Divide the rank by the number of columns: one of the two is the quotient, the other is the remainder.",
    ),
}

_ELEMENTS = 48


def _across(attempt: Attempt) -> dict[int, float]:
    """Return the bytes that each rank sends in groups with ranks of other rows."""
    columns = _shape(len(attempt.ranks))[1]
    found = dict.fromkeys(attempt.ranks, 0.0)
    for call in attempt.calls:
        if len({rank // columns for rank in call.ranks}) > 1:
            found[call.rank] += sent_bytes(call)
    return found


def _most_across(size: int) -> float:
    """Return the bytes of an all-reduce of one part of the tensor along a column."""
    rows, columns = _shape(size)
    return 2 * (rows - 1) / rows * 4 * _ELEMENTS / columns


PUZZLES: dict[str, Puzzle] = {
    "15/across": Puzzle(
        setup=f"""
from torch.distributed.device_mesh import init_device_mesh

rows = 2 if world_size >= 4 and world_size % 2 == 0 else 1
grid = init_device_mesh(device.type, (rows, world_size // rows), mesh_dim_names=("column", "row"))
in_row, in_column = grid["row"].get_group(), grid["column"].get_group()
x = torch.arange({_ELEMENTS}.0, device=device) + rank
wanted = sum(torch.arange({_ELEMENTS}.0, device=device) + r for r in range(world_size))
""",
        call="solution(x, in_row, in_column)",
        wanted="wanted",
        targets=(
            Target(measure=Measure(name="bytes sent to other rows", of=_across, in_words=in_bytes), most=_most_across),
        ),
        why="within the row each rank gets a part of the sum. Only this part crosses to the other rows.",
        hint="Make the tensor small before it crosses: which collective within the row leaves each rank a part of "
        "the sum? "
        "And which one puts the parts together again?",
        wrong_hint="Return the sum of the tensors of all ranks, on every rank.",
    ),
}
