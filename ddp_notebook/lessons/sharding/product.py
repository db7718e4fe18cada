"""A @ B with both matrices distributed over the ranks: guess which collective combines the result, run it, look at the
pieces."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.lesson import guess_of, options, run_with_guess
from ddp_notebook.lessons.lesson_cells import LessonRunner, running
from ddp_notebook.lessons.lesson_display import DisplayedLesson
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ddp_notebook import TensorPlacement
    from ddp_notebook.display import Picture
    from ddp_notebook.lessons.lesson import Wish
    from ddp_notebook.session import Session

Matrix = npt.NDArray[np.float64]

PLACEMENTS = ("Replicate()", "Shard(0)", "Shard(1)")
CHOICES = ("nothing", "all_gather", "all_reduce")
QUESTION = "What puts the whole result on every rank, when A @ B has been computed?"
_MOST_RANKS = 8  # most ranks that a picture can show
_WHY = {
    "nothing": "every rank has computed all of it.",
    "all_gather": "elements are finished where they were computed, and the other ranks lack them.",
    "all_reduce": "every rank has a summand of each element, and they are added up.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A matrix, and the part of each rank."""

    name: str
    placement: TensorPlacement
    values: dict[int, Matrix]  # by rank


class Product(DisplayedLesson):
    """Product of two matrices that are distributed over the running ranks.

    Args:
        of_a, of_b: Placements of A and B: "Replicate()", "Shard(0)" or "Shard(1)".
        session: Session to use; None for the running one.

    Raises:
        UsageError: There is no such placement, or there are too many ranks for a picture.
        NoSessionError: No ranks are running.

    Example:
        >>> product = lessons.product("Shard(1)", "Shard(0)").guess("all_gather").run()
        >>> product.answer, product.is_right
        ('all_reduce', False)
    """

    def __init__(self, of_a: str = "Replicate()", of_b: str = "Shard(1)", session: Session | None = None) -> None:
        self._runner = LessonRunner(running(session))
        if self.world_size > _MOST_RANKS:
            raise UsageError(f"lessons.product needs 2 to {_MOST_RANKS} ranks, got {self.world_size}: %ddp_resize 4")
        self.a, self.b = _matrices(self.world_size)
        self.configure(of_a=of_a, of_b=of_b)

    def configure(self, *, of_a: str, of_b: str) -> None:
        """Distribute the matrices in another way, without multiplying them. Takes the arguments of the class."""
        for of in (of_a, of_b):
            if of not in PLACEMENTS:
                raise UsageError(f"placements must be among {', '.join(map(repr, PLACEMENTS))}, got {of!r}")
        self.of_a, self.of_b = of_a, of_b
        self.guessed: str | None = None
        self.to_multiply: list[str] = []  # collectives of rank 0
        self.to_put_together: list[str] = []
        self.whole: dict[int, Matrix] = {}  # result of each rank, after it was combined
        self.nbytes = 0  # bytes of these collectives on rank 0
        self._deal_out()
        self.held = [self._look(name) for name in ("a", "b")]
        self._let_go()

    def guess(self, choice: str | EllipsisType) -> Product:
        """Guess which collective combines the result. The dots of a notebook mean no guess.

        Raises:
            UsageError: The guess is not among the choices.
        """
        self.guessed = guess_of(choice, CHOICES) or self.guessed
        return self

    def run(self) -> Product:
        """Multiply on the ranks, then combine the result."""
        self._deal_out()
        self._runner.mark()
        self._runner.run("_lesson_product.multiply()")
        self.to_multiply, before = self._calls()
        self.held = [*self.held[:2], self._look("c")]
        self._runner.mark()
        told = self._runner.ask("_lesson_told = _lesson_product.put_together()")
        self.to_put_together, after = self._calls()
        self.whole = {rank: np.array(values) for rank, values in told.items()}
        self.nbytes = before + after
        self._let_go()
        return self

    @property
    def world_size(self) -> int:
        return self._runner.session.world_size

    @property
    def has_run(self) -> bool:
        return bool(self.whole)

    @property
    def answer(self) -> str | None:
        """Return the answer according to the recording; None before the run."""
        if not self.has_run:
            return None
        return self.to_put_together[0] if self.to_put_together else "nothing"

    @property
    def is_right(self) -> bool | None:
        """Return whether the guess was right; None without a guess or before the run."""
        return None if self.guessed is None or not self.has_run else self.guessed == self.answer

    @property
    def agrees(self) -> bool | None:
        """Return whether all ranks finally have the result of NumPy; None before the run."""
        return all((one == self.a @ self.b).all() for one in self.whole.values()) if self.has_run else None

    @property
    def said(self) -> list[str]:
        """Return sentences about the outcome."""
        if self.answer is None:
            return []
        verdict = {None: "", True: "You were right: ", False: f"Not {self.guessed!r}: "}[self.is_right]
        words = f"{verdict}{self.answer}; {_WHY.get(self.answer, 'so it was recorded.')}"
        found = [words]
        if self.to_multiply:
            found.append(
                f"Before that, to multiply at all, {', '.join(self.to_multiply)}: the pieces of A and B did not fit "
                "each other, and DTensor moved one of them silently."
            )
        moved = f"in all {size(self.nbytes)} a rank" if self.nbytes else "no byte was sent"
        same = "the product that NumPy computes" if self.agrees else "NOT the product that NumPy computes"
        return [*found, f"In the end every rank has {same}; {moved}."]

    def picture(self) -> Figure:
        """Return a figure of the matrices, coloured by the ranks that hold each element. It stays in a saved
        notebook."""
        return _draw(self)

    # ---- in the browser

    def state(self) -> dict[str, Any]:
        """Return everything that the browser draws."""
        return {
            "kind": "product",
            "world_size": self.world_size,
            "placements": PLACEMENTS,
            "of_a": self.of_a,
            "of_b": self.of_b,
            "question": QUESTION,
            "choices": CHOICES,
            "guess": self.guessed,
            "answer": self.answer,
            "right": self.is_right,
            "said": self.said,
            "to_multiply": self.to_multiply,
            "to_put_together": self.to_put_together,
            "matrices": [_drawn(one) for one in self.held],
            "whole": None if not self.has_run else self.whole[0],
            "agrees": self.agrees,
        }

    def act(self, wish: Wish) -> None:
        """Handle a request of the browser: "configure", or "run" with a guess.

        Raises:
            UsageError: The request is invalid.
        """
        match wish["do"]:
            case "configure":
                self.configure(**options(wish))
            case "run":
                run_with_guess(self, wish)

    def __repr__(self) -> str:
        state = " ".join(self.said) if self.has_run else f"{QUESTION} {' or '.join(map(repr, CHOICES))}"
        return f"<A @ B with A {self.of_a}, B {self.of_b} on {self.world_size} ranks: {state}>"

    # ---- parts of the ranks, and recorded calls

    def _deal_out(self) -> None:
        self._runner.run(
            "from ddp_notebook.lessons.sharding import ranks as _lesson_sharding\n"
            f"_lesson_product = _lesson_sharding.ShardedProduct({self.a.tolist()}, {self.b.tolist()}, {self.of_a!r}, "
            f"{self.of_b!r}, device)"
        )

    def _let_go(self) -> None:
        """Delete the tensors on the ranks: a resize is impossible while ranks hold tensors in pieces."""
        self._runner.run("del _lesson_product")

    def _look(self, name: str) -> Held:
        told = self._runner.ask(f"_lesson_told = _lesson_sharding.local(_lesson_product.{name})")
        (placement,) = self._runner.session.placement(f"_lesson_product.{name}").tensors
        values = {rank: np.array(one).reshape(placement.parts[rank].size) for rank, one in told.items()}
        return Held(name={"a": "A", "b": "B", "c": "A @ B"}[name], placement=placement, values=values)

    def _calls(self) -> tuple[list[str], int]:
        """Return the collectives of rank 0 since the mark, with the names that torch documents, and their bytes."""
        calls = [call for call in self._runner.calls() if call.rank == 0]
        names = [call.op.replace("_single", "").replace("_coalesced", "") for call in calls]
        return names, sum(call.nbytes for call in calls)


def product(of_a: str = "Replicate()", of_b: str = "Shard(1)", *, session: Session | None = None) -> Product:
    """Multiply two matrices that are distributed over the ranks; see `Product`."""
    return Product(of_a, of_b, session)


def _matrices(world_size: int) -> tuple[Matrix, Matrix]:
    """Return A and B with integer values, so that rounding hides no error. All pieces have the same size."""
    rows, inner = (world_size * -(-least // world_size) for least in (3, 6))
    a = (3 * np.arange(rows)[:, None] + 5 * np.arange(inner)) % 7
    b = (2 * np.arange(inner)[:, None] + 3 * np.arange(rows)) % 5
    return a.astype(np.float64), b.astype(np.float64)


def _drawn(held: Held) -> dict[str, Any]:
    placement = held.placement
    return {
        "name": held.name,
        "shape": placement.shape,
        "placement": ", ".join(placement.placements),
        "partial": placement.is_partial,
        "parts": [
            {"rank": rank, "offset": part.offset, "size": part.size, "values": held.values[rank]}
            for rank, part in placement.parts.items()
        ],
    }


def _draw(lesson: Product) -> Picture:
    """Draw each matrix with its elements in the colours of the ranks that hold them. Partial sums are hatched.

    A matrix of full size on every rank is drawn once for each rank, because one matrix in several colours would look
    like shards.
    """
    from matplotlib.patches import Rectangle

    from ddp_notebook.display import INK, LINES, picture

    title = lesson.said[0] if lesson.has_run else f"A is {lesson.of_a}, B is {lesson.of_b}: not multiplied yet"
    widths = [one.placement.shape[1] for one in lesson.held]
    figure, panels = picture(title, 1.3 + 0.3 * max(one.placement.shape[0] for one in lesson.held), columns=widths)
    for axes, held in zip(panels, lesson.held, strict=True):
        _matrix(axes, held)
    colours = [LINES[rank % len(LINES)] for rank in range(lesson.world_size)]
    marks = [Rectangle((0, 0), 1, 1, color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours)]
    figure.legend(
        handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9, labelcolor=INK
    )
    return figure


def _matrix(axes: Axes, held: Held) -> None:
    from ddp_notebook.display import INK

    placement = held.placement
    rows, columns = placement.shape
    parts = list(placement.parts.items())
    is_whole = len(parts) > 1 and all(tuple(part.size) == (rows, columns) for _, part in parts)
    words = ", ".join(placement.placements)
    if is_whole:
        words += f"\n{'a summand' if placement.is_partial else 'a copy'} on each rank"
    across = 1 if not is_whole else 2 if len(parts) <= 4 else 4
    down = -(-len(parts) // across) if is_whole else 1
    gap = 0.15  # between copies, relative to their size
    for at, (rank, _) in enumerate(parts):
        scale = 1 / across if is_whole else 1.0
        corner = ((at % across) * (1 + gap) * columns * scale, (at // across) * (1 + gap) * rows * scale)
        _part(axes, rank, placement, corner if is_whole else (0.0, 0.0), scale)
    spaces = gap / across if is_whole else 0
    right, bottom = columns * (1 + (across - 1) * spaces), rows * (down / across + (down - 1) * spaces)
    axes.set(xlim=(-0.05, right + 0.05), ylim=(bottom + 0.05, -0.05), xticks=[], yticks=[], aspect="equal")
    axes.set_title(f"{held.name}: {words}", color=INK, fontsize=9)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _part(axes: Axes, rank: int, placement: TensorPlacement, corner: tuple[float, float], scale: float) -> None:
    """Draw the elements that a rank holds."""
    from matplotlib.patches import Rectangle

    from ddp_notebook.display import INK, LINES

    part, colour = placement.parts[rank], LINES[rank % len(LINES)]
    hatch: dict[str, Any] = {"alpha": 0.45, "hatch": "///", "edgecolor": colour} if placement.is_partial else {}
    for r in range(part.size[0]):
        for c in range(part.size[1]):
            place = corner[0] + (part.offset[1] + c) * scale, corner[1] + (part.offset[0] + r) * scale
            axes.add_patch(Rectangle(place, scale, scale, facecolor=colour, linewidth=0, **hatch))
            axes.add_patch(Rectangle(place, scale, scale, facecolor="none", edgecolor=INK, linewidth=0.4))
