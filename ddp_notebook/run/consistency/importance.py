"""Order of findings: variables of the last training cell first, those of earlier cells last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddp_notebook.run.consistency.differences import Difference
from ddp_notebook.run.consistency.disagreements import Facts, variables_of
from ddp_notebook.run.consistency.sentences import variable_of

# The most important kind comes first. Other kinds come last.
_KINDS = ("scaler", "parameter", "optimizer", "scheduler", "module", "missing", "data", "buffer", "setting", "version")


def last_steps(by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """Return the cell of the last optimizer step by variable, on any rank."""
    found: dict[str, int] = {}
    for facts in by_rank.values():
        for name, cell in facts.get("stepped", {}).items():
            found[name] = max(cell, found.get(name, 0))
    return found


def earlier_variables(steps: Mapping[str, int]) -> frozenset[str]:
    """Return the variables with optimizer steps in an earlier cell, and none in the last training cell.

    Example:
        >>> sorted(earlier_variables({"toy": 3, "model": 8, "optimizer": 8}))
        ['toy']
    """
    last = max(steps.values(), default=0)
    return frozenset(name for name, cell in steps.items() if cell < last)


def is_input(one: Difference, steps: Mapping[str, int]) -> bool:
    """Return whether a difference is of a tensor that requires gradients, while optimizers change other variables.

    Such a tensor is the input of a pipeline stage, for example.
    """
    return bool(steps) and one.kind == "parameter" and one.entry == variable_of(one.entry) and one.entry not in steps


def with_other_layers(differences: Sequence[Difference], by_rank: Facts) -> set[str]:
    """Return the models and optimizers with other shapes on some rank, although all ranks trained them.

    Such ranks cannot have trained one model together, because averages of gradients need equal shapes.
    """
    found = set()
    for one in differences:
        variable = variable_of(one.entry)
        is_model = one.kind == "parameter" and one.entry != variable
        has_shapes = all("(" in (part.value or "(") for part in one.parts)  # numbers, such as `step`, have none
        is_optimizer = one.kind == "optimizer" and (one.entry == variable or has_shapes)
        was_trained = all(variable in facts.get("stepped", ()) for facts in by_rank.values())
        if (is_model or is_optimizer) and not one.is_inside and was_trained:
            found.add(variable)
    return found


def by_importance(
    differences: Sequence[Difference], steps: Mapping[str, int], earlier: Collection[str]
) -> list[Difference]:
    """Return the differences of variables of the last training cell first, each variable by its most important kind."""
    most: dict[str, int] = {}
    for one in differences:
        is_absent = one.kind == "module" and any(part.value is None for part in one.parts)  # with its parameters
        name = "parameter" if is_absent else one.kind
        kind = _KINDS.index(name) if name in _KINDS else len(_KINDS)
        variable = variable_of(one.entry)
        most[variable] = min(kind, most.get(variable, kind))

    def place(one: Difference) -> tuple[Any, ...]:
        variable = variable_of(one.entry)
        is_earlier = variable in earlier
        return is_earlier, -steps.get(variable, 0) if is_earlier else 0, most[variable], variable not in steps

    return sorted(differences, key=place)


def split_mistakes(mistakes: Sequence[str], by_rank: Facts, earlier: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the mistakes of the last training cell and those of earlier cells.

    A mistake is of an earlier cell if all of its variables are.
    """
    old = [one for one in mistakes if (names := variables_of(one, by_rank)) and names <= set(earlier)]
    return [one for one in mistakes if one not in old], old
