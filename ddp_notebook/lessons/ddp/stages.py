"""A training step in five stages, with the changes of each on the ranks.

1 construction, 2 forward, 3 backward, 4 all-reduce of each bucket, 5 optimizer; then 2 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddp_notebook.observe.views import BucketLayout
from ddp_notebook.records.units import size

if TYPE_CHECKING:
    from ddp_notebook import Agreement
    from ddp_notebook.display import Picture
    from ddp_notebook.lessons.ddp.driver import Driver, Numbers
    from ddp_notebook.lessons.ddp.inside_options import Options


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stage:
    """One stage of a step on the ranks. A notebook shows its text and its picture.

    `before` and `after` are the first elements by rank: of the weights in stages 1 and 5, of the gradient of one
    parameter in 3, of a bucket in 4.
    """

    number: int  # 1 to 5
    title: str
    text: str
    before: Numbers = field(default_factory=dict)
    after: Numbers = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    buckets: tuple[BucketLayout, ...] = ()
    # events on rank 0: ms since the backward started, kind, name or bucket
    events: tuple[tuple[float, str, Any], ...] = ()
    calls: tuple[str, ...] = ()  # torch.distributed operations that rank 0 has called
    agreement: Agreement | None = None

    def __repr__(self) -> str:
        return f"<stage {self.number} of 5: {self.title}>"

    def picture(self) -> Picture:
        from ddp_notebook.lessons.ddp import stage_pictures

        return stage_pictures.stage(self)

    def _ipython_display_(self) -> None:
        from ddp_notebook.lessons.lesson_display import show_picture

        print(self.text)
        show_picture(self.picture(), repr(self))


class Stages:
    """A model that goes through the stages, one per call of `next`.

    Args:
        driver: Driver of the ranks.
        options: Options of the model.
    """

    def __init__(self, driver: Driver, options: Options) -> None:
        self._driver = driver
        self._options = options
        self.done: list[Stage] = []
        self._held = 0  # number of buckets held back for their all-reduce
        self._reduced = 0

    def next(self) -> Stage:
        """Run the next stage. An all-reduce stage handles one bucket."""
        last = self.done[-1].number if self.done else 0
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
        self.done.append(found)
        return found

    def _construct(self) -> Stage:
        self._driver.make(self._options)
        before = self._driver.weights()
        differed = self._driver.check_weights()
        told = self._driver.do("construct()")
        agreement = self._driver.check_weights()
        after = self._driver.weights()
        was = "agree" if differed.agrees else f"differ in {len(differed.differences)} parameters"
        text = (
            f"Each rank initialized its own weights; before, the ranks {was}.\nDDP broadcasts those of rank 0. After "
            f"it: {agreement!r}"
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
        told = self._driver.do("forward()")
        losses = self._driver.found()
        passes = self._options.no_sync
        text = (
            "Each rank has its own batch, and so its own loss. "
            + ("Nothing is sent." if not told else "Only rank 0's new order of the buckets is sent to all ranks.")
            + (f"\nBefore it, {passes} passes in no_sync() left their gradients on their rank." if passes else "")
        )
        return Stage(number=2, title="forward: every rank alone", text=text, losses=losses, calls=told)

    def _backward(self) -> Stage:
        told = self._driver.do("backward()")
        found = self._driver.found()
        first = found[0]
        self._held, self._reduced = len(first["buckets"]), 0
        agreement = self._driver.check_gradient()
        full = f"{self._held} buckets are" if self._held != 1 else "1 bucket is"
        text = (
            "Autograd goes from the last layer to the first. As a gradient becomes ready, a hook of DDP puts it into "
            f"its bucket; {full} full now, and held back so that you can inspect them.\n"
            f"The gradient of {self._driver.parameter} is that of each rank's own batch: {_in_words(agreement)}"
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
        told = self._driver.do(f"reduce({number})")
        found = self._driver.found()
        self._reduced += 1
        agreement = self._driver.check_gradient()
        bucket = self.done[-1].buckets[number]
        names = ", ".join(bucket.parameters)
        text = (
            f"It holds {size(bucket.nbytes)}: {names}.\n"
            f"Every rank divides it by {self._driver.session.world_size} and all_reduce adds them up: the mean. "
            f"The gradient of {self._driver.parameter}: {_in_words(agreement)}"
        )
        return Stage(
            number=4,
            title=f"all-reduce: bucket {number} ({number + 1} of {self._held})",
            text=text,
            before={rank: one["local"] for rank, one in found.items()},
            after={rank: one["mean"] for rank, one in found.items()},
            buckets=self.done[-1].buckets,
            calls=told,
            agreement=agreement,
        )

    def _update(self) -> Stage:
        told = self._driver.do("update()")
        found = self._driver.found()
        agreement = self._driver.check_weights()
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


def _layouts(buckets: list[dict[str, Any]]) -> tuple[BucketLayout, ...]:
    return tuple(BucketLayout(nbytes=one["nbytes"], parameters=tuple(one["parameters"])) for one in buckets)


def _in_words(agreement: Agreement) -> str:
    return "the same on all ranks." if agreement.agrees else "different on every rank."
