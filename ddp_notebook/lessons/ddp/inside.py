"""DDP from the inside: a training step of a real model on the running ranks, one stage at a time or at speed.

    ddp = lessons.inside_ddp(bucket_cap_mb=1)
    ddp.step()                    # 1 construction; then 2 forward, 3 backward, 4 all-reduce of each bucket, 5 optimizer
    ddp.run(comm_hook="fp16")     # some whole steps with an option changed, and when everything happened in them
    ddp.compare()                 # all runs so far below each other
    ddp.sliders()                 # the same by hand

All numbers come from the ranks: what they have told (`session[...]`), what was recorded of them
(`session.recording`), and whether they agree (`session.check`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddp_notebook import RecordOptions
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.ddp.times import Span, medians_ms
from ddp_notebook.lessons.session import running
from ddp_notebook.observe.views import WARM_UP
from ddp_notebook.records.schema import SPANS

if TYPE_CHECKING:
    from ddp_notebook.observe.figures.drawing import Picture
    from ddp_notebook.observe.views import BucketLayout, Gradient, Step
    from ddp_notebook.run.agree.agreement import Agreement
    from ddp_notebook.session import Session

HOOKS = (None, "fp16", "bf16", "powersgd")
OPTIONS: dict[str, Any] = {
    "bucket_cap_mb": 25.0,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "find_unused_parameters": False,
    "no_sync": 0,
    "comm_hook": None,
    "powersgd_rank": 2,
    "straggler": None,
    "straggler_ms": 30.0,
    "link_mb_s": None,
    "unused": False,
    "parameter": None,
}

Numbers = Mapping[int, list[float]]


def inside_ddp(
    model: str | None = None,
    *,
    bucket_cap_mb: float = 25.0,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    no_sync: int = 0,
    comm_hook: str | None = None,
    powersgd_rank: int = 2,
    straggler: int | None = None,
    straggler_ms: float = 30.0,
    link_mb_s: float | None = None,
    unused: bool = False,
    parameter: str | None = None,
    session: Session | None = None,
) -> InsideDDP:
    """Watch `DistributedDataParallel` at work on the running ranks, on scikit-learn's handwritten digits.

    Args:
        model: Python that gives a module on each rank, such as "nn.Sequential(nn.Linear(64, 10))"; it takes (B, 64)
            images and gives (B, 10) logits. None: four linear layers with 0.9 M parameters.
        bucket_cap_mb, gradient_as_bucket_view, static_graph, find_unused_parameters: as in `DistributedDataParallel`.
        no_sync: how many backward passes in `no_sync()` come before each one that synchronises.
        comm_hook: "fp16", "bf16" or "powersgd", of torch's; None: DDP's own all-reduce.
        powersgd_rank: of PowerSGD's approximation.
        straggler: this rank sleeps for `straggler_ms` before each forward.
        link_mb_s: a slower network, in 1e6 bytes per second. It is made by waiting: each bucket is all-reduced for
            real, and then 2 (N - 1) / N of its bytes occupy a link of this speed, one bucket after the other.
        unused: the model has one more layer, which has no part in the loss.
        parameter: whose gradient is shown; None: the last of the model.
        session: None: the current one.

    Raises:
        NoSessionError: no ranks are running.
        UsageError: an option that cannot be.

    Example:
        >>> ddp = inside_ddp(bucket_cap_mb=1)
        >>> ddp.run().buckets[0].parameters
        ('last.bias', 'last.weight', 'third.bias', 'third.weight')

    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html (internal design)
    """
    given = {name: value for name, value in locals().items() if name in OPTIONS}
    return InsideDDP(model, given, session)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stage:
    """One stage of a step, as it was on the ranks. A notebook shows its text and its picture.

    `before` and `after` are the first elements by rank of what the stage is about: weights in 1 and 5, the gradient of
    one parameter in 3, a bucket in 4.
    """

    number: int  # 1 to 5
    title: str
    text: str
    before: Numbers = field(default_factory=dict)
    after: Numbers = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    buckets: tuple[BucketLayout, ...] = ()
    events: tuple[tuple[float, str, Any], ...] = ()  # of rank 0: ms since the backward began, what, whose
    calls: tuple[str, ...] = ()  # what rank 0 has called of torch.distributed
    agreement: Agreement | None = None

    def __repr__(self) -> str:
        return f"<stage {self.number} of 5: {self.title}>"

    def picture(self) -> Picture:
        from ddp_notebook.lessons.ddp import pictures

        return pictures.stage(self)

    def _ipython_display_(self) -> None:
        _show(f"{self.number}. {self.title}\n{self.text}", self.picture())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run:
    """Some whole steps with the same options."""

    name: str  # what is different from the defaults
    options: Mapping[str, Any]
    cell: int
    steps: tuple[Step, ...]  # of all ranks
    buckets: tuple[BucketLayout, ...]  # in the order in which they are synchronised from the second step on
    first_buckets: tuple[BucketLayout, ...]  # in the first step
    gradients: Mapping[int, Gradient]  # of the last step, by rank: local before, mean after
    losses: Numbers
    sent_bytes: float  # that a rank gives to all-reduces per step, as recorded
    spans: tuple[Span, ...]
    agreement: Agreement

    @property
    def ms(self) -> dict[str, float]:
        """Where a step's time goes, by part: medians over steps and ranks, without the first steps."""
        return medians_ms(self.spans, self.steps, self._settled)

    def ms_of(self, rank: int) -> dict[str, float]:
        """The same of one rank."""
        return medians_ms(self.spans, self.steps, [one for one in self._settled if one.rank == rank])

    @property
    def _settled(self) -> list[Step]:
        return [step for step in self.steps if step.step >= WARM_UP] or list(self.steps)

    @property
    def typical(self) -> int:
        """The number of the step whose duration is nearest to the median."""
        longest: dict[int, int] = {}
        for step in self.steps:
            longest[step.step] = max(longest.get(step.step, 0), step.duration_ns)
        settled = {number: ns for number, ns in longest.items() if number >= WARM_UP} or longest
        middle = statistics.median_low(settled.values())
        return next(number for number, ns in settled.items() if ns == middle)

    def __repr__(self) -> str:
        ms = self.ms
        return (
            f"<{self.name}: {len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)}, {ms['step']:.0f} ms a step, "
            f"{ms['exposed']:.0f} ms of communication exposed, {ms['waiting']:.0f} ms of waiting, "
            f"{self.sent_bytes / 1e6:.1f} MB sent>"
        )

    def picture(self) -> Picture:
        """The typical step on all ranks."""
        from ddp_notebook.lessons.ddp import pictures

        return pictures.run(self)

    def layout(self) -> Picture:
        """Which parameter sits in which bucket."""
        from ddp_notebook.lessons.ddp import pictures

        return pictures.layout(self.first_buckets, self.buckets)

    def _ipython_display_(self) -> None:
        _show(repr(self), self.picture())


class InsideDDP:
    """See `inside_ddp`."""

    def __init__(self, model: str | None, options: Mapping[str, Any], session: Session | None = None) -> None:
        self._session = found = running(session)
        self._model = model
        self.options = _checked({**OPTIONS, **options}, found.world_size)
        self.stages: list[Stage] = []
        self.runs: list[Run] = []
        self._held = 0  # buckets that wait for their all-reduce
        self._reduced = 0

    def __repr__(self) -> str:
        at = f"after {self.stages[-1]!r}" if self.stages else "before its first stage"
        return f"<InsideDDP on {self._session.world_size} ranks: {at}, {len(self.runs)} runs>"

    # ---- one stage at a time

    def step(self) -> Stage:
        """Do the next stage: a bucket at a time where it is the all-reduce."""
        last = self.stages[-1].number if self.stages else 0
        if last == 0:
            found = self._construct()
        elif last in (1, 5):
            found = self._forward()
        elif last == 2:
            found = self._backward()
        elif self._reduced < self._held:
            found = self._reduce()
        else:
            found = self._update()
        self.stages.append(found)
        return found

    def play(self) -> list[Stage]:
        """All stages up to the end of this training step."""
        before = len(self.stages)
        while self.step().number != 5:
            pass
        return self.stages[before:]

    def _construct(self) -> Stage:
        self._make(self.options)
        before = self._ask("weights()", "weights")
        differed = self._session.check("_inside_network")
        told = self._do("construct()")
        agreement = self._session.check("_inside_network")
        after = self._ask("weights()", "weights")
        was = "agree" if differed.agrees else f"differ in {len(differed.differences)} parameters"
        text = (
            f"Each rank drew weights of its own; before, the ranks {was}.\nDDP broadcasts what rank 0 has. After it: "
            f"{agreement!r}"
        )
        return Stage(
            number=1,
            title="construction: the weights of rank 0 go to all ranks",
            text=text,
            before=before,
            after=after,
            calls=told,
            agreement=agreement,
        )

    def _forward(self) -> Stage:
        told = self._do("forward()")
        losses = dict(self._session["_inside_found"].items())
        passes = self.options["no_sync"]
        text = (
            "Each rank has a batch of its own, so each has a loss of its own. "
            + ("Nothing is sent." if not told else "Only the new order of the buckets is: that of rank 0, for all.")
            + (f"\nBefore it, {passes} passes in no_sync() left their gradients on their rank." if passes else "")
        )
        return Stage(number=2, title="forward: every rank alone", text=text, losses=losses, calls=told)

    def _backward(self) -> Stage:
        told = self._do("backward()")
        found = dict(self._session["_inside_found"].items())
        first = found[0]
        self._held, self._reduced = len(first["buckets"]), 0
        agreement = self._session.check("_inside_gradient")
        full = f"{self._held} buckets are" if self._held != 1 else "1 bucket is"
        text = (
            "Autograd goes from the last layer to the first. As a gradient becomes ready, a hook of DDP puts it into "
            f"its bucket; {full} full now, and kept back here so that you can look.\n"
            f"The gradient of {self._parameter} is that of each rank's own batch: {_in_words(agreement)}"
        )
        return Stage(
            number=3,
            title="backward: hooks put gradients into buckets",
            text=text,
            before={rank: one["gradient"] for rank, one in found.items()},
            buckets=_layouts(first["buckets"]),
            events=tuple((1000 * at, what, whose) for at, what, whose in first["events"]),
            calls=told,
            agreement=agreement,
        )

    def _reduce(self) -> Stage:
        number = self._reduced
        told = self._do(f"reduce({number})")
        found = dict(self._session["_inside_found"].items())
        self._reduced += 1
        agreement = self._session.check("_inside_gradient")
        bucket = self.stages[-1].buckets[number]
        names = ", ".join(bucket.parameters)
        text = (
            f"It holds {bucket.nbytes / 1e6:.2f} MB: {names}.\nEvery rank divides it by {self._session.world_size} and "
            f"all_reduce adds them up: the mean. The gradient of {self._parameter}: {_in_words(agreement)}"
        )
        return Stage(
            number=4,
            title=f"all-reduce: bucket {number} ({number + 1} of {self._held})",
            text=text,
            before={rank: one["local"] for rank, one in found.items()},
            after={rank: one["mean"] for rank, one in found.items()},
            buckets=self.stages[-1].buckets,
            calls=told,
            agreement=agreement,
        )

    def _update(self) -> Stage:
        told = self._do("update()")
        found = dict(self._session["_inside_found"].items())
        agreement = self._session.check("_inside_network")
        text = (
            "Equal weights and equal gradients give equal weights, so nothing has to be sent: "
            f"{len(told)} calls of torch.distributed.\nAfter it: {agreement!r}"
        )
        return Stage(
            number=5,
            title="optimizer: every rank makes the same step",
            text=text,
            before={rank: one["before"] for rank, one in found.items()},
            after={rank: one["after"] for rank, one in found.items()},
            calls=told,
            agreement=agreement,
        )

    # ---- at speed

    def run(self, steps: int = 8, **changes: Any) -> Run:
        """Make some whole steps on the ranks, of a new model, with these options changed.

        Args:
            steps: how many.
            changes: options of `inside_ddp`.

        Raises:
            UsageError: there is no such option, or it cannot be.
            RankError: what torch says of options that do not fit the model.
        """
        options = _checked({**self.options, **changes}, self._session.world_size)
        self._make(options)
        began = time.monotonic_ns()  # layouts have no cell
        self._cell(f"_inside_found = _inside.train({int(steps)})", gradient=self._parameter)
        recording = self._session.recording
        cell = recording.steps(rank=0)[-1].cell
        layouts = [one for one in recording.layouts if one.rank == 0 and one.time_ns >= began]
        calls = recording.collectives(op="all_reduce", rank=0, cell=cell)
        spans = recording.rows("span")
        own = [step for step in recording.steps(cell=cell, rank=0) if step.step >= WARM_UP]
        settled = [step.start_ns for step in own] or [began]
        found = Run(
            name=name_of(options),
            options=options,
            cell=cell,
            steps=tuple(recording.steps(cell=cell)),
            buckets=layouts[-1].buckets if layouts else (),
            first_buckets=layouts[0].buckets if layouts else (),
            gradients={one.rank: one for one in recording.gradients(self._parameter) if one.cell == cell},
            losses={rank: one["losses"] for rank, one in self._session["_inside_found"].items()},
            sent_bytes=sum(one.nbytes_in for one in calls if one.issue_ns >= settled[0]) / len(settled),
            spans=tuple(
                Span(int(row["rank"]), int(row["start_ns"]), int(row["end_ns"]), SPANS[row["kind"]])
                for row in spans[(spans["cell"] == cell) & (spans["end_ns"] >= 0)]
                if SPANS[row["kind"]] in ("forward", "backward", "optimizer")
            ),
            agreement=self._session.check("_inside_network"),
        )
        self.runs.append(found)
        return found

    def compare(self, *runs: Run) -> Picture:
        """A typical step of each run on rank 0, below each other on one axis of time.

        Args:
            runs: None: all.
        """
        from ddp_notebook.lessons.ddp import pictures

        if not (chosen := runs or tuple(self.runs)):
            raise UsageError("there is nothing to compare: `run` comes first")
        return pictures.compare(chosen)

    def table(self, *runs: Run) -> str:
        """What a step of each run takes, in text."""
        rows: list[tuple[str, ...]] = [("", "buckets", "MB sent", "step ms", "compute", "exposed", "waiting", "loss")]
        for run in runs or self.runs:
            ms = run.ms
            loss = statistics.mean(losses[-1] for losses in run.losses.values())
            parts = [f"{ms[part]:.1f}" for part in ("step", "compute", "exposed", "waiting")]
            rows.append((run.name, str(len(run.buckets)), f"{run.sent_bytes / 1e6:.2f}", *parts, f"{loss:.3f}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                one.ljust(width) if not at else one.rjust(width)
                for at, (one, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def sliders(self) -> None:
        """Show the options as sliders: each change runs anew on the ranks, and the picture follows."""
        from ddp_notebook.lessons.ddp.sliders import Sliders

        Sliders(self, self._session).show()

    # ---- the ranks

    def _make(self, options: Mapping[str, Any]) -> None:
        self._session.push(_inside_options=dict(options))
        make = "None" if self._model is None else f"lambda: ({self._model})"
        self._cell(
            "from torch import nn\n"
            "from ddp_notebook.lessons.ddp.ranks import Inside as _Inside\n"
            f"_inside = _Inside(_inside_options, {make}, device)\n"
            "_inside_network, _inside_found = _inside.network, _inside.parameter"
        )
        self._parameter: str = self._session.pull("_inside_found", 0)[0]

    def _do(self, call: str) -> tuple[str, ...]:
        """Let the ranks do something, and tell what they have called of torch.distributed for it."""
        began = time.monotonic_ns()
        self._cell(
            f"_inside_found = _inside.{call}\n"
            "_inside_gradient = dict(_inside.network.named_parameters())[_inside.parameter].grad"
        )
        calls = self._session.recording.collectives(rank=0)
        return tuple(one.op for one in calls if one.issue_ns >= began and not one.op.startswith("comm hook"))

    def _ask(self, call: str, what: str) -> Numbers:
        self._cell(f"_inside_found = _inside.{call}")
        return {rank: found[what] for rank, found in self._session["_inside_found"].items()}

    def _cell(self, code: str, gradient: str = "") -> None:
        self._session.run(code, quiet=True, record=RecordOptions(gradient=gradient))


def name_of(options: Mapping[str, Any]) -> str:
    """The options that differ from the defaults, in words."""
    told = [f"buckets of {options['bucket_cap_mb']:g} MB"]
    told += [name for name in ("gradient_as_bucket_view", "static_graph", "find_unused_parameters") if options[name]]
    if options["no_sync"]:
        told.append(f"{options['no_sync']} passes in no_sync")
    if options["comm_hook"]:
        told.append(options["comm_hook"] + (f" rank {options['powersgd_rank']}" * (options["comm_hook"] == "powersgd")))
    if options["straggler"] is not None:
        told.append(f"rank {options['straggler']} {options['straggler_ms']:g} ms late")
    if options["link_mb_s"] is not None:
        told.append(f"link of {options['link_mb_s']:g} MB/s")
    return ", ".join(told)


def _checked(options: dict[str, Any], world_size: int) -> dict[str, Any]:
    if unknown := set(options) - set(OPTIONS):
        raise UsageError(f"there is no option {', '.join(sorted(unknown))}; the options are {', '.join(OPTIONS)}")
    if options["comm_hook"] not in HOOKS:
        names = ", ".join(map(repr, HOOKS))
        raise UsageError(f"there is no comm hook {options['comm_hook']!r} here; choose among {names}")
    if options["straggler"] is not None and options["straggler"] not in range(world_size):
        raise UsageError(f"rank {options['straggler']} cannot be late: the ranks are 0 to {world_size - 1}")
    for name in ("bucket_cap_mb", "link_mb_s", "powersgd_rank"):
        if options[name] is not None and not options[name] > 0:
            raise UsageError(f"{name} is above 0, not {options[name]}")
    return options


def _layouts(buckets: list[dict[str, Any]]) -> tuple[BucketLayout, ...]:
    from ddp_notebook.observe.views import BucketLayout

    return tuple(BucketLayout(nbytes=one["nbytes"], parameters=tuple(one["parameters"])) for one in buckets)


def _in_words(agreement: Agreement) -> str:
    return "the same on all ranks." if agreement.agrees else "different on every rank."


def _show(text: str, picture: Picture) -> None:
    from IPython.display import display

    print(text)
    display(picture)
