"""Training on a mesh of ranks: guess the traffic along rows and columns, run a step, look at the communication."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.lesson import guess_of, options, run_with_guess
from ddp_notebook.lessons.lesson_cells import LessonRunner, running
from ddp_notebook.lessons.lesson_display import DisplayedLesson
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from ddp_notebook.display import Picture
    from ddp_notebook.lessons.lesson import Wish
    from ddp_notebook.observe.views import Collective
    from ddp_notebook.session import Session

WAYS = {
    "HSDP": "HSDP: shards in a row, copies down the column",
    "TP and FSDP": "tensor parallel in a row, FSDP down the column",
}
CHOICES = ("along the row", "down the column")
QUESTION = "Along what does rank 0 move more bytes in a training step?"
_WIDTH = 24  # width of the network
_APART = 1e-9  # tolerance for losses in 64 bits


class MeshTraining(DisplayedLesson):
    """A small network, trained by the running ranks as a mesh.

    Args:
        rows: Rows of the mesh. None for two if there can be two rows of at least two ranks, otherwise one.
        way: "HSDP" or "TP and FSDP".
        is_by_rank: Give each rank a different batch, which is wrong if ranks share a matrix.
        session: Session to use; None for the running one.

    Raises:
        UsageError: The ranks cannot be divided into these rows, or there is no such way.
        NoSessionError: No ranks are running.

    Example:
        >>> training = lessons.mesh(way="HSDP").guess("along the row").run()
        >>> training.answer, training.is_same
        ('along the row', True)
    """

    def __init__(
        self,
        rows: int | None = None,
        way: str = "HSDP",
        *,
        is_by_rank: bool = False,
        session: Session | None = None,
    ) -> None:
        self._runner = LessonRunner(running(session))
        n = self.world_size
        self.configure(
            rows=(2 if n >= 4 and n % 2 == 0 else 1) if rows is None else rows, way=way, is_by_rank=is_by_rank
        )

    def configure(self, *, rows: int, way: str, is_by_rank: bool = False) -> None:
        """Choose another mesh or another way, without running it. Takes the arguments of the class."""
        if way not in WAYS:
            raise UsageError(f"way must be one of {', '.join(map(repr, WAYS))}, got {way!r}")
        if rows not in (heights := _divisors(self.world_size)):
            words = ", ".join(map(str, heights))
            raise UsageError(f"rows must divide the {self.world_size} ranks evenly ({words}), got {rows}")
        self.rows, self.columns, self.way = rows, self.world_size // rows, way
        self.is_by_rank = is_by_rank and way != "HSDP"
        self.guessed: str | None = None
        self.calls: list[Collective] = []  # calls of the step on all ranks, in the order of their start
        self.told: Mapping[int, Mapping[str, Any]] = {}
        self.mistakes: tuple[str, ...] = ()  # findings of %ddp_check

    def guess(self, choice: str | EllipsisType) -> MeshTraining:
        """Guess along which direction more bytes are moved. The dots of a notebook mean no guess.

        Raises:
            UsageError: The guess is not among the choices.
        """
        self.guessed = guess_of(choice, CHOICES) or self.guessed
        return self

    def run(self) -> MeshTraining:
        """Train two steps on the ranks. The second one is shown, because FSDP initialises itself in the first."""
        self._runner.run(
            "from ddp_notebook.lessons.sharding import ranks as _lesson_sharding\n"
            f"_lesson_mesh = _lesson_sharding.OnMesh({self.rows}, {self.columns}, {self.way!r}, {_WIDTH}, "
            f"{self.is_by_rank}, device)\n"
            "_lesson_mesh.step()"
        )
        self._runner.mark()
        self._runner.run("_lesson_mesh.step()")
        calls = [call for call in self._runner.calls() if len(call.ranks) > 1]
        self.calls = sorted(calls, key=lambda call: call.issue_ns)
        # The check reports the last cell with such inputs. That is this cell only if ranks share a matrix.
        shares = self.is_by_rank and self.columns > 1
        self.mistakes = self._runner.session.check("_lesson_mesh").mistakes if shares else ()
        self.told = self._runner.ask("_lesson_told = _lesson_mesh.told()")
        # Delete the model: a resize is impossible while ranks hold shards. FSDP has reference cycles, so collect
        # garbage too.
        self._runner.run("import gc as _lesson_gc\ndel _lesson_mesh\n_lesson_gc.collect()")
        return self

    @property
    def world_size(self) -> int:
        return self._runner.session.world_size

    @property
    def has_run(self) -> bool:
        return bool(self.told)

    def row(self, rank: int) -> tuple[int, ...]:
        """Return the ranks in the row of this rank."""
        first = rank - rank % self.columns
        return tuple(range(first, first + self.columns))

    def nbytes(self, rank: int = 0) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the number of calls and the bytes of a rank, by "row" and "column" and by purpose."""
        found: dict[str, dict[str, tuple[int, int]]] = {"row": {}, "column": {}}
        for call in self.calls:
            if call.rank == rank:
                of = found[self._way_of(call)]
                count, nbytes = of.get(_purpose(call), (0, 0))
                of[_purpose(call)] = count + 1, nbytes + call.nbytes
        return found

    def _way_of(self, call: Collective) -> str:
        return "row" if set(call.ranks) <= set(self.row(call.rank)) else "column"

    @property
    def answer(self) -> str | None:
        """Return the answer according to the recording; None before the run."""
        if not self.has_run:
            return None
        total = {way: sum(nbytes for _, nbytes in of.values()) for way, of in self.nbytes().items()}
        return CHOICES[0] if total["row"] >= total["column"] else CHOICES[1]

    @property
    def is_right(self) -> bool | None:
        """Return whether the guess was right; None without a guess or before the run."""
        return None if self.guessed is None or not self.has_run else self.guessed == self.answer

    @property
    def off(self) -> float | None:
        """Return the largest difference from the losses of a single process; None before the run.

        Compares the first loss of each rank for its batch, and the mean of the last losses over all batches.
        """
        if not self.has_run:
            return None
        ranks = self.told.values()
        first = max(abs(one["losses"][0] - one["alone"]) for one in ranks)
        by_batch = {one["batch"]: one["losses"][-1] for one in ranks}
        mean = sum(by_batch.values()) / len(by_batch)
        return first if self.is_by_rank else max(first, abs(mean - self.told[0]["together"][-1]))

    @property
    def is_same(self) -> bool | None:
        """Return whether the losses equal those of a single process; None before the run."""
        return None if self.off is None else self.off < _APART

    @property
    def said(self) -> list[str]:
        """Return sentences about the outcome."""
        if self.off is None or self.answer is None:
            return []
        verdict = {None: "", True: "You were right: ", False: f"Not {self.guessed}: "}[self.is_right]
        total = {way: sum(nbytes for _, nbytes in of.values()) for way, of in self.nbytes().items()}
        words = f"{verdict}{self.answer}; {size(total['row'])} along the row, {size(total['column'])} down the column."
        if self.is_same:
            same = "Losses are those of one process" + (f", within {self.off:.0e}" if self.off else "")
        else:
            same = f"Losses are NOT those of one process: they are off by {self.off:.2g}, and torch says nothing"
        held = self.told[0]["held"]
        checked = [f"%ddp_check says: {one}" for one in self.mistakes]
        return [words[0].upper() + words[1:], f"{same}. Rank 0 holds {held:.0%} of the parameters.", *checked]

    def picture(self) -> Figure:
        """Return a figure of the grid and the traffic along its lines. It stays in a saved notebook."""
        return _draw(self)

    # ---- in the browser

    def state(self) -> dict[str, Any]:
        """Return everything that the browser draws."""
        began = min((call.issue_ns for call in self.calls), default=0)
        return {
            "kind": "mesh",
            "world_size": self.world_size,
            "ways": list(WAYS.items()),
            "way": self.way,
            "heights": _divisors(self.world_size),
            "rows": self.rows,
            "columns": self.columns,
            "by_rank": self.is_by_rank,
            "question": QUESTION,
            "choices": CHOICES,
            "guess": self.guessed,
            "answer": self.answer,
            "right": self.is_right,
            "said": self.said,
            "same": self.is_same,
            "run": self.has_run,
            "held": {rank: one["held"] for rank, one in self.told.items()},
            "batches": {rank: one["batch"] for rank, one in self.told.items()},
            "calls": [
                {
                    "rank": call.rank,
                    "way": self._way_of(call),
                    "purpose": _purpose(call),
                    "op": call.op,
                    "module": call.module,
                    "nbytes": call.nbytes,
                    "start": (call.issue_ns - began) / 1e6,
                    "end": ((call.end_ns or call.issue_ns) - began) / 1e6,
                }
                for call in self.calls
            ],
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
        return f"<{WAYS[self.way]}, on {self.rows} x {self.columns} ranks: {state}>"


def mesh(
    rows: int | None = None, way: str = "HSDP", *, is_by_rank: bool = False, session: Session | None = None
) -> MeshTraining:
    """Train on a mesh of the ranks; see `MeshTraining`."""
    return MeshTraining(rows, way, is_by_rank=is_by_rank, session=session)


def _divisors(n: int) -> list[int]:
    return [one for one in range(1, n + 1) if n % one == 0]


def _purpose(call: Collective) -> str:
    """Return the purpose of a collective, or its name if the purpose is not known."""
    return call.meaning or call.op.replace("_single", "").replace("_coalesced", "")


def _draw(lesson: MeshTraining) -> Picture:
    """Draw the grid of the ranks. The width of a line shows the bytes of a rank along it in one step."""
    from ddp_notebook.display import INK, LINES, ON_LINES, ON_PALE, picture

    colours = {"row": LINES[0], "column": LINES[1]}
    title = lesson.said[0] if lesson.has_run else f"{lesson.rows} x {lesson.columns} ranks: not trained yet"
    figure, (axes,) = picture(title, 1.3 + 0.8 * lesson.rows)
    moved = lesson.nbytes()
    total = {way: sum(nbytes for _, nbytes in of.values()) for way, of in moved.items()}
    for way, nbytes in total.items():
        size_of_way = lesson.columns if way == "row" else lesson.rows
        if size_of_way == 1 or (lesson.has_run and not nbytes):
            continue
        thick = 2 + 10 * nbytes / max(*total.values(), 1)
        style: dict[str, Any] = {"color": colours[way], "linewidth": thick, "alpha": 0.6, "solid_capstyle": "round"}
        for line in range(lesson.rows if way == "row" else lesson.columns):
            along, across = [0, (lesson.columns if way == "row" else lesson.rows) - 1], [line, line]
            axes.plot(*((along, across) if way == "row" else (across, along)), zorder=1, **style)
        what = ", ".join(f"{count} x {purpose}" for purpose, (count, _) in moved[way].items())
        told = f"{what}; {size(nbytes)}" if lesson.has_run else "how many bytes?"
        axes.plot([], [], label=f"{way}: {told}", **{**style, "linewidth": 5})
    for rank in range(lesson.world_size):
        r, c = divmod(rank, lesson.columns)
        axes.scatter(c, r, s=520, facecolor=ON_LINES, edgecolor=LINES[rank % len(LINES)], linewidth=2, zorder=2)
        axes.text(c, r, str(rank), ha="center", va="center", fontsize=11, color=ON_PALE, zorder=3)
    axes.set(xlim=(-0.6, lesson.columns - 0.4), ylim=(lesson.rows - 0.5, -0.5), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False, fontsize=8.5, labelcolor=INK)
    return figure
