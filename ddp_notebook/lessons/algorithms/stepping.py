"""Algorithms step by step: real sends and receives on the ranks."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.algorithms.plans import Links
from ddp_notebook.lessons.collectives import theory
from ddp_notebook.lessons.collectives.theory import Array, Values
from ddp_notebook.lessons.lesson import options
from ddp_notebook.lessons.lesson_cells import LessonRunner, running
from ddp_notebook.lessons.lesson_display import DisplayedLesson
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.display import Picture
    from ddp_notebook.lessons.lesson import Wish
    from ddp_notebook.session import Session

_MOST_WHOLE = 4096  # elements; for more, a step returns only the first element of each chunk
_DTYPES = ("float32", "float64", "int32", "int64")

Chunks = dict[int, list[Array]]  # arrays of the chunks, by rank
Who = dict[int, list[frozenset[int]]]  # ranks whose data each element contains, by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmState:
    """State of the ranks after a step.

    Args:
        rule: Rule that the step has followed; "" before the first step.
        moves: Data sent in the step: (from, to, first element, end, whether it was added).
        chunks: Current chunks of each rank.
        who: Ranks whose data the first element of each chunk contains.
        bytes_moved: Recorded bytes over each link since the start.
    """

    rule: str
    moves: tuple[tuple[int, int, int, int, bool], ...]
    chunks: Chunks
    who: dict[int, list[frozenset[int]]]
    bytes_moved: Links


class Stepper(DisplayedLesson):
    """One algorithm on the running ranks.

    Args:
        name: One of `plans.ALGORITHMS`: "ring all_reduce", "tree all_reduce", "halving and doubling",
            "parameter server", "naive all_reduce", "ring all_gather", "ring reduce_scatter".
        elements: Elements of each rank's data.
        nbytes: Size of each rank's data in bytes, instead of `elements`.
        inputs: Numbers of each rank; None for numbers that show which ranks have contributed.
        sizes: Elements of the chunks, one for each rank; None for chunks that are as equal as possible.
        dtype: "float32", "float64", "int32" or "int64".
        session: Session to use; None for the running one.

    Raises:
        UsageError: There is no such algorithm, or the sizes do not fit.
        NoSessionError: No ranks are running.

    Example:
        >>> ring = lessons.algorithm("ring all_reduce", elements=8)
        >>> ring.step().moves[0]  # from, to, first element, end, whether it is added
        (0, 1, 0, 4, True)
        >>> ring.play().bytes_moved
        {(0, 1): 32, (1, 0): 32}
    """

    def __init__(
        self,
        name: str = "ring all_reduce",
        *,
        elements: int | None = None,
        nbytes: int | None = None,
        inputs: Mapping[int, Sequence[float]] | None = None,
        sizes: Sequence[int] | None = None,
        dtype: str = "float32",
        session: Session | None = None,
    ) -> None:
        self._runner = LessonRunner(running(session))
        self.configure(name=name, elements=elements, nbytes=nbytes, inputs=inputs, sizes=sizes, dtype=dtype)

    def configure(
        self,
        *,
        name: str,
        elements: int | None = None,
        nbytes: int | None = None,
        inputs: Mapping[int, Sequence[float]] | None = None,
        sizes: Sequence[int] | None = None,
        dtype: str = "float32",
    ) -> None:
        """Choose another algorithm or other data, and restart. Takes the arguments of the class."""
        if name not in plans.ALGORITHMS:
            raise UsageError(f"the algorithm must be one of {', '.join(plans.ALGORITHMS)}, got {name!r}")
        if dtype not in _DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        n = self._runner.session.world_size
        if inputs is not None:
            elements = _length(inputs, n)
        elif sizes is not None:
            elements = sum(sizes)
        elif elements is None:
            elements = 2 * n if nbytes is None else nbytes // np.dtype(dtype).itemsize
        if elements < 1:
            raise UsageError(f"the data must have at least 1 element, got {elements}: pass elements, nbytes or sizes")
        chunk_sizes = tuple(sizes) if sizes is not None else _even(elements, n)
        if len(chunk_sizes) != n or sum(chunk_sizes) != elements or min(chunk_sizes) < 0:
            raise UsageError(f"sizes must be {n} sizes of chunks with the sum {elements}, got {list(chunk_sizes)}")
        self.name, self.dtype, self.sizes, self.elements = name, dtype, chunk_sizes, elements
        self._inputs = None if inputs is None else {rank: list(values) for rank, values in inputs.items()}
        if self._inputs is None and elements <= _MOST_WHOLE:
            # All numbers of chunk 0 have the digit 1, those of chunk 1 the digit 2, and so on.
            digits = [at % 9 + 1 for at, length in enumerate(chunk_sizes) for _ in range(length)]
            self._inputs = {r: [float(10 ** (r % 4) * digit) for digit in digits] for r in range(n)}
        self.restart()

    def restart(self) -> None:
        """Restart with the same data."""
        self._key = uuid.uuid4().hex
        self._links: Links = {}
        self.compared: bool | None = None
        inputs: Any = self.elements if self._inputs is None else self._inputs
        per_rank = f"{inputs}" if self._inputs is None else f"{inputs}[rank]"
        told = self._runner.ask(
            "from ddp_notebook.lessons import ranks as _lesson_ranks\n"
            f"_lesson_told = _lesson_ranks.start({self._key!r}, {self.name!r}, {per_rank}, {self.sizes}, "
            f"{self.dtype!r})"
        )
        self._who: Who = {rank: [frozenset([rank])] * self.elements for rank in told} if self._is_whole else {}
        if self._is_whole and self.name == "ring all_gather":
            own = self._bounds
            self._who = {
                rank: [frozenset([rank] if own[rank][0] <= at < own[rank][1] else []) for at in range(self.elements)]
                for rank in told
            }
        self._origin = {rank: list(who) for rank, who in self._who.items()}
        self.states = [self._state("", told)]

    # ---- what it is, and where it is

    @property
    def world_size(self) -> int:
        return self._runner.session.world_size

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return plans.steps(self.name, self.world_size)

    @property
    def taken(self) -> int:
        """Return the number of finished steps."""
        return len(self.states) - 1

    @property
    def is_done(self) -> bool:
        return self.taken == self.steps

    @property
    def nbytes(self) -> int:
        """Return the size of one rank's data in bytes."""
        return self.elements * np.dtype(self.dtype).itemsize

    @property
    def rule(self) -> str:
        """Return the rule of the next step, or of the last one if all are finished."""
        return plans.rule(self.name, self.world_size, min(self.taken, self.steps - 1))

    @property
    def chunks(self) -> Chunks:
        """Return the current chunks of each rank; above 4096 elements only the first element of each chunk."""
        return self.states[-1].chunks

    @property
    def bytes_moved(self) -> Links:
        """Return the recorded bytes over each link so far: `{(0, 1): 24, ...}`."""
        return self.states[-1].bytes_moved

    @property
    def busiest_link(self) -> tuple[tuple[int, int], int] | None:
        """Return the link with the most bytes so far, and the bytes; None if nothing was moved."""
        return plans.busiest_link(self.bytes_moved)

    def theory(self) -> Links:
        """Return the bytes over each link for the whole algorithm, according to the formulas."""
        item = np.dtype(self.dtype).itemsize
        return plans.moved(self.name, [size * item for size in self.sizes])

    # ---- what it does

    def step(self) -> AlgorithmState:
        """Run one step on the ranks, if there is one left."""
        if not self.is_done:
            rule = plans.rule(self.name, self.world_size, self.taken)
            self._runner.mark()  # other calls may have been recorded since the last step
            told = self._runner.ask(
                "from ddp_notebook.lessons import ranks as _lesson_ranks\n"
                f"_lesson_told = _lesson_ranks.step({self._key!r})"
            )
            self._links = plans.added(self._links, self._runner.calls("send"))
            self.states.append(self._state(rule, told))
        return self.states[-1]

    def play(self) -> Stepper:
        """Run all remaining steps."""
        while not self.is_done:
            self.step()
        return self

    def result(self) -> Values:
        """Run all steps, and return the result of each rank: the whole data, or its own chunk after a
        reduce_scatter."""
        self.play()
        whole = self._runner.ask(f"_lesson_told = _lesson_ranks.whole({self._key!r})")
        if self.name != "ring reduce_scatter":
            return whole
        return {rank: values[slice(*self._bounds[rank])] for rank, values in whole.items()}

    def real(self) -> Values:
        """Return the result of the torch.distributed call on the same inputs."""
        return self._runner.ask(f"_lesson_told = _lesson_ranks.real({self._key!r}, {self.name!r})")

    @property
    def real_line(self) -> str:
        """Return that call as code."""
        return {
            "ring all_gather": "dist.all_gather(out, x)",
            "ring reduce_scatter": "dist.reduce_scatter(y, chunks)",
        }.get(self.name, "dist.all_reduce(x)")

    @property
    def agrees(self) -> bool:
        """Return whether all ranks finally have the result of the torch.distributed call."""
        mine, real = self.result(), self.real()
        call = theory.CollectiveCall(op="all_reduce", world_size=self.world_size, dtype=self.dtype)
        return all(all(theory.agree(call, mine[rank], real[rank])) for rank in mine)

    def compare(self) -> bool:
        """Run the remaining steps and the torch.distributed call. Return whether all ranks have its result."""
        self.compared = self.agrees
        return self.compared

    def picture(self) -> Figure:
        """Return a figure of all steps so far, from left to right. It stays in a saved notebook."""
        return _draw(self)

    # ---- in the browser

    def state(self) -> dict[str, Any]:
        """Return everything that the browser draws."""
        n = self.world_size
        return {
            "kind": "algorithm",
            "world_size": n,
            "name": self.name,
            "names": plans.ALGORITHMS,
            "steps": self.steps,
            "taken": self.taken,
            "sizes": self.sizes,
            "elements": self.elements,
            "nbytes": self.nbytes,
            "dtype": self.dtype,
            "rules": [plans.rule(self.name, n, step) for step in range(self.steps)],
            "states": [
                {
                    "moves": one.moves,
                    "chunks": one.chunks,
                    "who": one.who,
                    "links": [(src, dst, nbytes) for (src, dst), nbytes in one.bytes_moved.items()],
                }
                for one in self.states
            ],
            "theory": [(src, dst, nbytes) for (src, dst), nbytes in self.theory().items()],
            "real_line": self.real_line,
            "agrees": self.compared,
        }

    def act(self, wish: Wish) -> None:
        """Handle a request of the browser: "configure", "step", "play", "restart" or "compare".

        Raises:
            UsageError: The request is invalid.
        """
        match wish["do"]:
            case "configure":
                self.configure(**options(wish))
            case "step":
                self.step()
            case "play":
                self.play()
            case "restart":
                self.restart()
            case "compare":
                self.compare()

    def __repr__(self) -> str:
        busiest = self.busiest_link
        moved = sum(self.bytes_moved.values())
        parts = [f"step {self.taken} of {self.steps}", f"{moved} B moved"]
        if busiest is not None:
            parts.append(f"busiest link {busiest[0][0]} -> {busiest[0][1]} with {busiest[1]} B")
        return f"<{self.name} on {self.world_size} ranks: {', '.join(parts)}>"

    # ---- inside

    @property
    def _is_whole(self) -> bool:
        return self.elements <= _MOST_WHOLE

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        ends = np.cumsum(self.sizes).tolist()
        return [(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    def _state(self, rule: str, told: Mapping[int, Any]) -> AlgorithmState:
        moves = tuple(
            (rank, one["to"], one["start"], one["stop"], one["add"]) for rank in told for one in told[rank]["moves"]
        )
        if self._is_whole:
            before = {rank: list(who) for rank, who in self._who.items()}
            for rank in told:
                for one in told[rank]["moves"]:
                    source = (self._origin if one["fresh"] else before)[rank]
                    mine = self._who[one["to"]]
                    for at in range(one["start"], one["stop"]):
                        mine[at] = mine[at] | source[at] if one["add"] else source[at]
        return AlgorithmState(
            rule=rule,
            moves=moves,
            chunks={rank: told[rank]["values"] for rank in sorted(told)},
            who={
                rank: [who[first] if last > first else frozenset() for first, last in self._bounds]
                for rank, who in self._who.items()
            },
            bytes_moved=self._links,
        )


def _length(inputs: Mapping[int, Sequence[float]], world_size: int) -> int:
    """Return the number of elements of each rank."""
    lengths = {len(values) for values in inputs.values()}
    if len(lengths) != 1 or set(inputs) != set(range(world_size)):
        raise UsageError(f"inputs must have the same number of elements for each of the {world_size} ranks")
    return lengths.pop()


def _even(elements: int, n: int) -> tuple[int, ...]:
    """Return sizes that are as equal as possible, the larger ones first, like `torch.tensor_split`."""
    return tuple(elements // n + (at < elements % n) for at in range(n))


def _draw(stepper: Stepper) -> Picture:
    """Draw the chunks of every rank after each step, and the bytes over each link."""
    from ddp_notebook.display import INK, Picture
    from ddp_notebook.lessons import rank_columns

    shown = stepper.states if len(stepper.states) <= 8 else [*stepper.states[:4], *stepper.states[-4:]]
    numbers = [stepper.states.index(one) for one in shown]
    n = stepper.world_size
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    height = 1.0 + rows * (0.62 + rank_columns.CELL_IN * n) + 0.5
    figure = Picture(figsize=(8.4, height), layout="constrained", facecolor="none")
    moved = sum(stepper.bytes_moved.values())
    figure.suptitle(
        f"{stepper.name}: {stepper.taken} of {stepper.steps} steps, {size(moved)} moved",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
        color=INK,
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for one in grid.flat:
        rank_columns.bare(one, n, n + 0.9)
    for axes, number, state in zip(grid.flat, numbers, shown, strict=False):
        axes.set_title(f"step {number}" if number else "start", fontsize=9, color=INK, loc="left", pad=2)
        touched = {(dst, at) for _, dst, first, last, _ in state.moves for at in _chunks(stepper, first, last)}
        for rank, chunks in state.chunks.items():
            rank_columns.head(axes, rank, f"{rank}")
            for at, chunk in enumerate(chunks):
                who = tuple(sorted(state.who[rank][at])) if state.who else (rank,)
                words = rank_columns.number(chunk[0]) if len(chunk) else ""
                if len({float(value) for value in chunk}) > 1:  # the picture has no room for all of them
                    words += "\N{HORIZONTAL ELLIPSIS}"
                rank_columns.cell(axes, rank, 0.9 + at, words, who, is_new=(rank, at) in touched)
    busiest = stepper.busiest_link
    note = (f"last step: {stepper.states[-1].rule}" if stepper.taken else f"first step: {stepper.rule}") + (
        f"\nbusiest link {busiest[0][0]} -> {busiest[0][1]}: {size(busiest[1])}; through the ranks: "
        + ", ".join(f"{rank}: {size(of)}" for rank, of in plans.through_ranks(stepper.bytes_moved).items())
        if busiest
        else ""
    )
    rank_columns.legend(figure, n, note)
    return figure


def _chunks(stepper: Stepper, first: int, last: int) -> Iterable[int]:
    return (at for at, (begin, end) in enumerate(stepper._bounds) if begin < last and first < end)
