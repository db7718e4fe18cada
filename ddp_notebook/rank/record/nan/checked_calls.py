"""Gradients that ranks average, checked before the average.

One sum tells whether all elements are finite; it takes a thirtieth of the time of `isfinite`. The ranks need no further
communication to stop together: a rank with a bad gradient also sets the first element of each part of it to NaN. So the
average has a NaN there on all ranks of the group, also if each of them gets another part, as in FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ddp_notebook.rank.group.call_site import REDUCER, USER, origin
from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.record.event_buffer import EventBuffer
from ddp_notebook.rank.record.nan.gradients import SMALL
from ddp_notebook.stdlib import math

_REDUCES = frozenset(
    (
        *("all_reduce", "all_reduce_coalesced", "reduce"),
        *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    )
)
_SUMS = ("SUM", "AVG", "PREMUL_SUM")


class Checked(NamedTuple):
    """A gradient that was checked before its average.

    Args:
        call: the collective; its bucket is known once it has begun.
        total: sum of the elements on a GPU, which is not finite if one of them is not; None on the CPU.
        nans, infs, numel: counts of elements. On a GPU only `numel` is known.
        is_of_user: the user has called the collective.
    """

    call: Call
    total: torch.Tensor | None
    nans: int
    infs: int
    numel: int
    is_of_user: bool


class _Average(NamedTuple):
    """A collective that averages gradients in a backward: its bad gradients, and the first elements of its results."""

    backward: int  # number of autograd
    call: Call
    bad: list[Checked]
    first: list[torch.Tensor]

    @property
    def model(self) -> Any:
        """Return the DDP model or the module of FSDP; the group if they are unknown."""
        if self.call.bucket is not None:
            return self.call.bucket[0]
        site = self.call.site
        return site[5:] if site is not None and site[5] else self.call.group.serial


class CheckedCalls:
    """The averages since the last optimizer step.

    Args:
        event_buffer: has the bucket of the running comm hook.

    Attributes:
        is_on: averages are checked.
        has_sums_of_user: the user has called a sum of floating-point tensors since the last step.
    """

    def __init__(self, event_buffer: EventBuffer) -> None:
        self._event_buffer = event_buffer
        self.is_on = True
        self._averages: list[_Average] = []
        self._first_bad: list[Checked] | None = None  # made by the first bad backward
        self._of_user: list[Checked] = []
        self.has_sums_of_user = False

    def forget(self) -> None:
        """Forget all averages."""
        self._averages.clear()
        self._first_bad = None
        self._of_user.clear()
        self.has_sums_of_user = False

    def look(self, call: Call) -> None:
        """Check a collective that is about to start. Never raises."""
        kernel = call.kernel
        if self.is_on and kernel.spec.name in _REDUCES and (at := kernel.at_input) is not None:
            try:
                unseen(self._look, call, [one for one in flat(call.arguments[at]) if one.is_floating_point()])
            except RuntimeError:  # a tensor without readable values; the user's call must continue
                pass

    def _look(self, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors or tensors[0].is_meta or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        backward = torch._C._current_graph_task_id()
        maker = origin(5)
        if self._event_buffer.bucket is not None or maker in ("ddp hook", "fsdp"):
            self._look_at_average(call, tensors, backward)
        elif maker is USER:
            self._look_at_users(call, tensors)
        elif maker is REDUCER and backward != -1:
            self._look_at_average(call, tensors, backward)

    def _look_at_average(self, call: Call, tensors: Sequence[torch.Tensor], backward: int) -> None:
        """Check gradients that DDP or FSDP averages, and mark the bad ones.

        Args:
            backward: number of the running backward; -1 at the end of a backward of FSDP.
        """
        kernel, bad = call.kernel, []
        parts = len(call.group.ranks) if kernel.spec.name.startswith("reduce_scatter") else 1
        with torch.no_grad():
            for tensor in tensors:
                if (one := _checked(call, tensor, is_of_user=False)) is not None:
                    _mark(tensor, one.total, parts)
                    bad.append(one)
            results = [_first_of(one) for one in flat(call.arguments[kernel.at_output or 0]) if one.numel()]
        if self._averages:
            if backward == -1:
                backward = self._averages[-1].backward
            elif backward != self._averages[-1].backward:
                self._averages = self._last()
        self._averages.append(_Average(backward, call, bad, results))

    def _last(self) -> list[_Average]:
        """Return the averages of the last backward of each model.

        Gradients of an earlier one were added to those of the last one, or dropped by a program that skips a step.
        """
        last = {one.model: one.backward for one in self._averages}
        return [one for one in self._averages if one.backward == last[one.model]]

    def _look_at_users(self, call: Call, tensors: Sequence[torch.Tensor]) -> None:
        """Note a bad tensor that the user averages; it may be no gradient."""
        if call.kernel.reduce_op_of(call.arguments[call.kernel.at_rest :]) not in _SUMS:
            return
        self.has_sums_of_user = True
        with torch.no_grad():
            self._of_user += [
                one for tensor in tensors if (one := _checked(call, tensor, is_of_user=True)) is not None and one.nans
            ]

    # ---- before an optimizer step

    @property
    def has_averages(self) -> bool:
        """Return whether DDP or FSDP has averaged gradients since the last step."""
        return bool(self._averages)

    def is_any_bad(self) -> bool:
        """Return whether an averaged gradient has a NaN. It is the same on all ranks of a group. Waits for a GPU."""
        if self._first_bad is not None:
            return True
        with torch.no_grad():
            first = _first_elements(self._last())
            return first is not None and not bool(first.isfinite().all())

    @property
    def finite_before(self) -> int:
        """Number of averages of the last backwards before the first one with a bad gradient; 0 if none is known."""
        if self._first_bad is not None:
            return 0
        for number, average in enumerate(last := self._last()):
            if any(map(_is_bad, average.bad)):
                return sum(one.backward == average.backward for one in last[:number])
        return 0

    def note_gradients(self, are_finite: bool) -> None:
        """Note the gradients after a backward that another one will follow before the step, in accumulation.

        Later backwards add to bad gradients, and averages spread these. So the ranks of the first one count.
        """
        if are_finite:
            self._first_bad = None
        elif self._first_bad is None and self._averages:
            self._first_bad = [bad for average in self._last() for bad in average.bad]

    def bad(self) -> list[Checked]:
        """Return the bad gradients of this rank in the order of their averages, or else bad tensors of the user."""
        if self._first_bad is not None:
            return list(filter(_is_bad, self._first_bad))
        found = [one for average in self._last() for one in average.bad if _is_bad(one)]
        return found or list(self._of_user)


def _is_bad(one: Checked) -> bool:
    return one.total is None or not math.isfinite(one.total.item())


def _first_elements(averages: Sequence[_Average]) -> torch.Tensor | None:
    """Return the first elements of the results of some averages; None if there are none."""
    first = [one.float() for average in averages for one in average.first]
    return torch.cat(first) if first else None


def _checked(call: Call, tensor: torch.Tensor, *, is_of_user: bool) -> Checked | None:
    """Return the check of a gradient; None if it is on the CPU and finite."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values._values()
    total = values.sum(dtype=torch.float32 if values.dtype in SMALL else None)
    if not values.is_cpu:
        return Checked(call, total, 0, 0, values.numel(), is_of_user)
    if math.isfinite(total.item()):
        return None
    nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
    return Checked(call, None, nans, infs, values.numel(), is_of_user) if nans or infs else None  # a sum may overflow


def _mark(tensor: torch.Tensor, total: torch.Tensor | None, parts: int) -> None:
    """Set the first element of each part of a bad gradient to NaN. On a GPU without waiting for it.

    Args:
        total: on a GPU, the sum of the elements; None: the gradient is bad.
        parts: number of ranks that get a part each.
    """
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values._values()
    flat_values = values.view(-1)
    first = flat_values.view(parts, -1)[:, :1] if flat_values.numel() % parts == 0 else flat_values
    if total is None:
        first.fill_(math.nan)
    else:
        first.masked_fill_(~total.isfinite(), math.nan)


def _first_of(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    if values.layout is not torch.strided:
        values = values._values()
    return values.reshape(-1)[:1]
