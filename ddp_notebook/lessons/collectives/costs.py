"""Costs of algorithms: measured times over several sizes, and the fitted alpha-beta model.

T = m * alpha + n * beta: m sequential messages with a fixed time alpha each, and n bytes through the busiest rank with
a time beta each. `plans.cost` returns m and n of an algorithm.

Source: Hockney, "The communication challenge for MPP", 1994; Thakur et al., see `plans`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.lesson_cells import LessonRunner, running
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddp_notebook.display import Picture
    from ddp_notebook.session import Session

SIZES = (4_000, 40_000, 400_000, 1_200_000, 4_000_000)
ALGORITHMS = plans.REDUCES
OWN = "all_reduce"  # all_reduce of the backend
_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The alpha-beta model of one algorithm.

    Args:
        alpha_s: Seconds per message of any size.
        beta_s_per_byte: Seconds per byte.
        messages: Number of sequential messages.
        bytes_factor: Bytes through the busiest rank, relative to the size of the data.
        error: Median of |model - measured| / measured.
    """

    alpha_s: float
    beta_s_per_byte: float
    messages: int
    bytes_factor: float
    error: float

    def seconds(self, nbytes: float) -> float:
        """Return the predicted time for data of `nbytes` bytes."""
        return self.messages * self.alpha_s + self.bytes_factor * nbytes * self.beta_s_per_byte

    def __repr__(self) -> str:
        speed = f" ({1e-9 / self.beta_s_per_byte:.2f} GB/s)" if self.beta_s_per_byte else ""
        alpha, beta = f"{self.alpha_s * 1e6:.0f} us a message", f"{self.beta_s_per_byte * 1e9:.2f} ns a byte{speed}"
        return f"<Fit: alpha {alpha}, beta {beta}, off by {self.error:.0%} (median)>"


class Costs:
    """Times of algorithms over several sizes, measured on the ranks.

    Args:
        world_size: Number of ranks.
        backend: Backend whose all_reduce was also measured.
        times: Seconds by algorithm and bytes: the time of the slowest rank, in the fastest repeat. Other programs only
            add time.
        through: Recorded bytes into and out of each rank by algorithm, for data of `counted` bytes.
        counted: Size of the data for `through`.
        link: Milliseconds per message and 1e6 bytes per second of the simulated link of each rank; None for none.
    """

    def __init__(
        self,
        world_size: int,
        backend: str,
        times: Mapping[tuple[str, int], float],
        through: Mapping[str, Mapping[int, int]],
        counted: int,
        link: tuple[float, float] | None = None,
    ) -> None:
        self.world_size, self.backend, self.counted, self.link = world_size, backend, counted, link
        self.times = dict(times)
        self.through = {name: dict(ranks) for name, ranks in through.items()}
        self.fit = {name: fit(name, world_size, self.of(name)) for name in self.algorithms}

    @property
    def algorithms(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.times))

    @property
    def sizes(self) -> list[int]:
        return sorted({nbytes for _, nbytes in self.times})

    def of(self, algorithm: str) -> dict[int, float]:
        """Return the seconds of an algorithm by bytes."""
        return {nbytes: seconds for (name, nbytes), seconds in self.times.items() if name == algorithm}

    def plot(self) -> Figure:
        """Draw the measured points, the model, and the bytes through each rank."""
        return _draw(self)

    picture = plot

    def __repr__(self) -> str:
        largest = self.sizes[-1]
        times = ", ".join(f"{name} {self.times[name, largest] * 1e3:.1f} ms" for name in self.algorithms)
        return f"<Costs on {self.world_size} ranks ({self.backend}): {size(largest)} take {times}>"

    def _repr_html_(self) -> str:
        return _table_html(self)


def measure(
    sizes: Sequence[int] | None = None,
    algorithms: Sequence[str] | None = None,
    repeats: int = 5,
    link_mb_s: float | None = None,
    link_ms: float = 2.0,
    session: Session | None = None,
) -> Costs:
    """Measure all-reduce algorithms, and the all_reduce of the backend.

    Ranks on one machine share its memory, so their times say little about a network. With `link_mb_s` every rank has a
    link of its own for each direction. It is simulated by sleeping after the real messages, for as long as the link
    would have needed. The all_reduce of the backend cannot be simulated and is left out.

    Args:
        sizes: Bytes of the data; None for 4 kB to 4 MB.
        algorithms: Some of `plans.REDUCES`; None for all of them.
        repeats: Number of repeats; the fastest one counts.
        link_mb_s: Speed of the simulated links in 1e6 bytes per second; None for no simulation.
        link_ms: Time of each message on them, in milliseconds.
        session: Session to use; None for the running one.

    Raises:
        UsageError: There is no such algorithm, or a size is invalid.
        NoSessionError: No ranks are running.

    Example:
        >>> costs = lessons.cost(sizes=[4_000, 400_000])
        >>> costs.fit["ring all_reduce"].alpha_s > 0
        True
    """
    names = list(ALGORITHMS if algorithms is None else algorithms)
    for name in names:
        if name not in plans.REDUCES:
            raise UsageError(f"algorithms must be among {', '.join(plans.REDUCES)}, got {name!r}")
    chosen = sorted({int(nbytes) for nbytes in (SIZES if sizes is None else sizes)})
    if not chosen or chosen[0] < 4:
        raise UsageError(f"sizes must be numbers of bytes, each at least 4 (one float32), got {chosen}")
    if link_mb_s is not None and not (link_mb_s > 0 and link_ms >= 0):
        raise UsageError(f"link_mb_s must be greater than 0 and link_ms at least 0, got {link_mb_s} and {link_ms}")
    runner = LessonRunner(running(session))
    own = runner.session
    link = None if link_mb_s is None else (link_ms, link_mb_s)
    measured = names if link else [*names, OWN]
    in_seconds = None if link is None else (link_ms / 1e3, link[1] * 1e6)
    told = runner.ask(
        "from ddp_notebook.lessons import ranks as _lesson_ranks\n"
        f"_lesson_told = _lesson_ranks.time_algorithms({measured}, {chosen}, {int(repeats)}, {in_seconds})",
        _LIMIT_S,
        level="off",  # recording would slow down each message
    )
    times = {key: float(np.min(np.max([of[key] for of in told.values()], axis=0))) for key in told[0]}
    counted = chosen[-1]
    through = {}
    for name in names:
        runner.mark()
        runner.run(f"_lesson_ranks.run_once({name!r}, {counted})")
        through[name] = plans.through_ranks(plans.added({}, runner.calls("send")))
    return Costs(own.world_size, own.backend, times, through, counted, link)


def fit(algorithm: str, world_size: int, times: Mapping[int, float]) -> Fit:
    """Fit the model to times by bytes. Minimises relative errors, because sizes span decades.

    The backend's all_reduce is fitted like a ring.

    Example:
        >>> found = fit("ring all_reduce", 2, {1000: 0.00021, 1_000_000: 0.00121})
        >>> round(found.alpha_s * 1e6), round(found.beta_s_per_byte * 1e9, 2)
        (104, 1.0)
    """
    name = "ring all_reduce" if algorithm == OWN else algorithm
    messages, factor = plans.cost(name, world_size, 1.0)
    nbytes = np.array(list(times), float)
    seconds = np.array(list(times.values()), float)
    columns = np.stack([np.full(len(nbytes), float(messages)), factor * nbytes], axis=1) / seconds[:, None]
    alpha, beta = _least_squares(columns)
    model = messages * alpha + factor * nbytes * beta
    return Fit(
        alpha_s=alpha,
        beta_s_per_byte=beta,
        messages=messages,
        bytes_factor=factor,
        error=float(np.median(np.abs(model - seconds) / seconds)),
    )


def _least_squares(columns: Any) -> tuple[float, float]:
    """Return two non-negative factors with which the columns add up to ones, as least squares."""
    ones = np.ones(len(columns))
    if len(columns) > 1:
        alpha, beta = np.linalg.lstsq(columns, ones, rcond=None)[0].tolist()
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    # Use only one of them, the one with the smaller error.
    singles = [float(column @ ones / (column @ column)) for column in columns.T]
    errors = [float(((column * one - ones) ** 2).sum()) for column, one in zip(columns.T, singles, strict=True)]
    return (singles[0], 0.0) if errors[0] <= errors[1] else (0.0, singles[1])


def _draw(found: Costs) -> Picture:
    """Draw times over sizes with the model, and the bytes through each rank."""
    from matplotlib.ticker import FuncFormatter

    from ddp_notebook.display import FAINT, INK, LINES, picture

    link = "" if found.link is None else f", links of {found.link[1]:g} MB/s and {found.link[0]:g} ms a message"
    figure, (above, below) = picture(
        f"Time of an all-reduce on {found.world_size} ranks{link}",
        6.6,
        [1.7, 1],
    )
    sizes = found.sizes
    marks = "osD^vPX"
    for at, name in enumerate(found.algorithms):
        colour = INK if name == "all_reduce" else LINES[at % len(LINES)]
        times = found.of(name)
        above.plot(list(times), [t * 1e3 for t in times.values()], marks[at % 7], color=colour, ms=5)
        line = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)] if len(sizes) > 1 else sizes
        above.plot(line, [found.fit[name].seconds(one) * 1e3 for one in line], color=colour, lw=1.3)
        one = found.fit[name]
        above.plot(
            [],
            [],
            marks[at % 7] + "-",
            color=colour,
            lw=1.3,
            label=f"{_named(name, found)}: {one.messages} x {one.alpha_s * 1e3:.2f} ms + "
            f"{one.bytes_factor:g} n / {1e-6 / one.beta_s_per_byte if one.beta_s_per_byte else float('inf'):.0f} MB/s",
        )
    above.set(xscale="log", yscale="log", ylabel="time (ms)")
    above.yaxis.label.set_color(INK)
    above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    for axis_format in (above.yaxis.set_major_formatter, above.yaxis.set_minor_formatter):
        axis_format(FuncFormatter(lambda y, _: f"{y:g}" if f"{y:.0e}"[0] in "125" else ""))
    above.grid(True, color=FAINT, lw=0.6)
    legend = above.legend(
        fontsize=8, frameon=False, labelcolor=INK, title="points: measured; lines: m alpha + n beta", title_fontsize=8
    )
    legend.get_title().set_color(INK)
    names = [
        name
        for name in ("parameter server", "tree all_reduce", "ring all_reduce", "halving and doubling")
        if name in found.through
    ]
    for at, name in enumerate(names):
        height = 0.8 / max(len(names), 1)
        colour = LINES[found.algorithms.index(name) % len(LINES)]
        places = [rank - 0.4 + (at + 0.5) * height for rank in found.through[name]]
        bars = below.barh(places, list(found.through[name].values()), height * 0.9, color=colour, label=name)
        below.bar_label(bars, [size(x) for x in found.through[name].values()], fontsize=7, color=INK, padding=2)
    below.set(yticks=range(found.world_size), ylim=(found.world_size - 0.45, -0.55))
    below.set_yticklabels([f"rank {rank}" for rank in range(found.world_size)])
    below.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x)))
    below.set_xlabel(f"bytes into and out of each rank for {size(found.counted)} of data; colours as above", fontsize=9)
    below.xaxis.label.set_color(INK)
    below.margins(x=0.12)
    return figure


def _table_html(found: Costs) -> str:
    """Return an HTML table of the times and the parameters of the model."""
    head = "".join(f"<th>{size(nbytes)}</th>" for nbytes in found.sizes)
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(_named(name, found))}</th>"
        + "".join(f"<td>{found.times[name, nbytes] * 1e3:.2f}</td>" for nbytes in found.sizes)
        + f"<td>{found.fit[name].alpha_s * 1e6:.0f}</td><td>{found.fit[name].beta_s_per_byte * 1e9:.2f}</td></tr>"
        for name in found.algorithms
    )
    return (
        f"<table><caption>milliseconds on {found.world_size} ranks ({html.escape(found.backend)})</caption>"
        f"<tr><td></td>{head}<th>alpha, us</th><th>beta, ns/B</th></tr>{rows}</table>"
    )


def _named(name: str, found: Costs) -> str:
    return f"{found.backend}'s own all_reduce" if name == "all_reduce" else name
