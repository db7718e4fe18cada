"""A training on a mesh of ranks: guess what goes along its rows and down its columns, run a step, see who talks."""

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
_WIDTH = 24  # of the network
_APART = 1e-9  # losses in 64 bits that differ by more are other ones


class MeshTraining(DisplayedLesson):
    """A small network, trained by the running ranks as a mesh.

    Args:
        rows: of the mesh; None: two if the ranks can make two rows of two or more, else one.
        way: "HSDP" or "TP and FSDP".
        is_by_rank: let each rank have a batch of its own, which is wrong where ranks share a matrix.
        session: None: the running one.

    Raises:
        UsageError: so many rows cannot be made of these ranks, or there is no such way.
        NoSessionError: no ranks are running.

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
        """Take another mesh or another way; nothing has run on it yet. Arguments as those of the class."""
        if way not in WAYS:
            raise UsageError(f"there is no way {way!r}; there are {', '.join(map(repr, WAYS))}")
        if rows not in (heights := _divisors(self.world_size)):
            words = ", ".join(map(str, heights))
            raise UsageError(f"{self.world_size} ranks cannot stand in {rows} rows of one length: take {words}")
        self.rows, self.columns, self.way = rows, self.world_size // rows, way
        self.is_by_rank = is_by_rank and way != "HSDP"
        self.guessed: str | None = None
        self.calls: list[Collective] = []  # of the step, of all ranks, in the order of their beginning
        self.told: Mapping[int, Mapping[str, Any]] = {}
        self.mistakes: tuple[str, ...] = ()  # what %ddp_check says

    def guess(self, choice: str | EllipsisType) -> MeshTraining:
        """Say along what more bytes go; the dots of a notebook say nothing.

        Raises:
            UsageError: it is none of the choices.
        """
        self.guessed = guess_of(choice, CHOICES) or self.guessed
        return self

    def run(self) -> MeshTraining:
        """Train two steps on the ranks. The second is the one that is shown: FSDP prepares itself in the first."""
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
        # It tells of the last cell that has such inputs, which is this one only where ranks share a matrix.
        shares = self.is_by_rank and self.columns > 1
        self.mistakes = self._runner.session.check("_lesson_mesh").mistakes if shares else ()
        self.told = self._runner.ask("_lesson_told = _lesson_mesh.told()")
        # Ranks that hold a model in shards could not become more or fewer; FSDP's parts refer to each other.
        self._runner.run("import gc as _lesson_gc\ndel _lesson_mesh\n_lesson_gc.collect()")
        return self

    @property
    def world_size(self) -> int:
        return self._runner.session.world_size

    @property
    def has_run(self) -> bool:
        return bool(self.told)

    def row(self, rank: int) -> tuple[int, ...]:
        """The ranks of the row in which this one is."""
        first = rank - rank % self.columns
        return tuple(range(first, first + self.columns))

    def nbytes(self, rank: int = 0) -> dict[str, dict[str, tuple[int, int]]]:
        """By "row" and "column", and by what for: how many calls, and how many bytes, of a rank."""
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
        """What the recording answers; None: it has not run yet."""
        if not self.has_run:
            return None
        total = {way: sum(nbytes for _, nbytes in of.values()) for way, of in self.nbytes().items()}
        return CHOICES[0] if total["row"] >= total["column"] else CHOICES[1]

    @property
    def is_right(self) -> bool | None:
        """Whether the guess was right; None: nothing was guessed, or it has not run yet."""
        return None if self.guessed is None or not self.has_run else self.guessed == self.answer

    @property
    def off(self) -> float | None:
        """How far the losses are from those of one process: the first of each rank for its batch, and the mean of the
        last over all batches. None: it has not run yet."""
        if not self.has_run:
            return None
        ranks = self.told.values()
        first = max(abs(one["losses"][0] - one["alone"]) for one in ranks)
        by_batch = {one["batch"]: one["losses"][-1] for one in ranks}
        mean = sum(by_batch.values()) / len(by_batch)
        return first if self.is_by_rank else max(first, abs(mean - self.told[0]["together"][-1]))

    @property
    def is_same(self) -> bool | None:
        """Whether it is the training of one process; None: it has not run yet."""
        return None if self.off is None else self.off < _APART

    @property
    def said(self) -> list[str]:
        """What has happened, in sentences."""
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
        """The grid, and what went along its lines: a figure that stays in a saved notebook."""
        return _draw(self)

    # ---- in the browser

    def state(self) -> dict[str, Any]:
        """All that the browser draws."""
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
        """Do what a button asks for: "configure", or "run" with a guess.

        Raises:
            UsageError: it cannot be done.
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
    """Train on a mesh of the ranks, and see who talks to whom; see `MeshTraining`."""
    return MeshTraining(rows, way, is_by_rank=is_by_rank, session=session)


def _divisors(n: int) -> list[int]:
    return [one for one in range(1, n + 1) if n % one == 0]


def _purpose(call: Collective) -> str:
    """What a collective is for; its name where that is not known."""
    return call.meaning or call.op.replace("_single", "").replace("_coalesced", "")


def _draw(lesson: MeshTraining) -> Picture:
    """The grid of the ranks; the width of a line is the number of bytes of a rank that went along it in one step."""
    from ddp_notebook.display import INK, LINES, picture

    colours = {"row": LINES[0], "column": LINES[1]}
    title = lesson.said[0] if lesson.has_run else f"{lesson.rows} x {lesson.columns} ranks: not trained yet"
    figure, (axes,) = picture(title, 1.3 + 0.8 * lesson.rows)
    moved = lesson.nbytes()
    total = {way: sum(nbytes for _, nbytes in of.values()) for way, of in moved.items()}
    for way, nbytes in total.items():
        if not nbytes:
            continue
        thick = 2 + 10 * nbytes / max(total.values())
        style: dict[str, Any] = {"color": colours[way], "linewidth": thick, "alpha": 0.6, "solid_capstyle": "round"}
        for line in range(lesson.rows if way == "row" else lesson.columns):
            along, across = [0, (lesson.columns if way == "row" else lesson.rows) - 1], [line, line]
            axes.plot(*((along, across) if way == "row" else (across, along)), zorder=1, **style)
        what = ", ".join(f"{count} x {purpose}" for purpose, (count, _) in moved[way].items())
        axes.plot([], [], label=f"{way}: {what}; {size(nbytes)}", **{**style, "linewidth": 5})
    for rank in range(lesson.world_size):
        r, c = divmod(rank, lesson.columns)
        axes.scatter(c, r, s=520, facecolor="white", edgecolor=LINES[rank % len(LINES)], linewidth=2, zorder=2)
        axes.text(c, r, str(rank), ha="center", va="center", fontsize=11, color="#333", zorder=3)
    axes.set(xlim=(-0.6, lesson.columns - 0.4), ylim=(lesson.rows - 0.5, -0.5), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    if any(total.values()):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), frameon=False, fontsize=8.5, labelcolor=INK)
    return figure
