"""What every lesson with a view has, and how wishes of its view become arguments. Both ways travel plain data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.lessons.session import Runner

Wish = Mapping[str, Any]  # what a button asks for: `{"do": "step"}`, and what that needs


class Lesson(Protocol):
    """A lesson that a browser can draw: `Explorer`, `Stepper`, `Scene`."""

    _runner: Runner

    def state(self) -> dict[str, Any]:
        """All that the browser draws, as plain data; "kind" says which of its views draws it."""
        ...

    def act(self, wish: Wish) -> None:
        """Do what a button asks for; what this lesson does not know is ignored.

        Raises:
            UsageError: it cannot be done.
        """
        ...

    def picture(self) -> Figure:
        """The figure that stays in a saved notebook."""
        ...


def options(wish: Wish) -> dict[str, Any]:
    """The keyword arguments that a wish has for `configure`."""
    found = dict(wish.get("options") or {})
    if found.get("inputs") is not None:
        found["inputs"] = by_rank(found["inputs"])
    return found


def by_rank(values: Mapping[str, Any]) -> dict[int, Any]:
    """Values by rank, whose numbers are text in JSON.

    Example:
        >>> by_rank({"0": [1, 2], "3": [4]})
        {0: [1, 2], 3: [4]}
    """
    return {int(rank): given for rank, given in values.items()}
