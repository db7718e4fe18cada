"""Variables of the ranks in the front end, while no thread has stopped: one group for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.messages.ranks import Checked
from ddp_notebook.messages.whos_messages import ListVariables
from ddp_notebook.records.units import size
from ddp_notebook.run.rank_requests import Questions

_ANSWER_S = 2.0  # time for the answer of a rank


def group(rank: int, number: int) -> dict[str, Any]:
    """Return the group of a rank, as a variable of the debug adapter protocol.

    Args:
        number: number by which the front end requests its variables.
    """
    return {"name": f"rank {rank}", "value": "", "type": "", "evaluateName": "", "variablesReference": number}


def read_group(questions: Questions, rank: int) -> list[dict[str, Any]]:
    """Return the variables of a rank, also while it runs a cell. Waits for the answer.

    Raises:
        LookupError: the rank does not answer.
    """
    answers: dict[int, Checked] = questions.ask_for([rank], lambda number: ListVariables(request=number), _ANSWER_S)
    if rank not in answers:
        raise LookupError(f"rank {rank} did not answer within {_ANSWER_S:g} s")
    return [_variable(name, row) for name, row in sorted(answers[rank].facts.get("rows", {}).items())]


def _variable(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    # the tree of JupyterLab shows the type
    kind = " ".join(filter(None, [row["type"], row.get("dtype"), row.get("shape")]))
    nbytes, device = row.get("nbytes"), row.get("device")
    value = ("" if nbytes is None else size(nbytes)) + (f" on {device}" if device else "")
    return {"name": name, "value": value, "type": kind, "evaluateName": "", "variablesReference": 0}
