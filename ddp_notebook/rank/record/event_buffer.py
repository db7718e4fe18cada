"""Event buffer: references and times from the training threads. The recorder's thread makes rows of them.

All code here runs in the user's threads in the middle of a step, so it slows the step down.
`tests/benchmarks/recording.py` measures its cost.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from ddp_notebook.rank import gpu
from ddp_notebook.rank.group.call_site import MARKED, REDUCER, CallSites, SiteFields
from ddp_notebook.rank.group.calls import (
    DONE,
    FAILED,
    ISSUED,
    KEPT,
    LEFT_OUT,
    NOT_ASKED_FOR,
    UNWAITED,
    Call,
    noting_time,
)
from ddp_notebook.rank.group.kernels.repeats import Repeating
from ddp_notebook.rank.group.modules import Modules
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.rank.group.sequences import Known, Moment, Sequence
from ddp_notebook.rank.hide_from_profiler import function_modes, operator_modes, unseen
from ddp_notebook.rank.record import previews
from ddp_notebook.rank.record.gpu_times import marks_of
from ddp_notebook.rank.record.training.repeated_buckets import rows_of
from ddp_notebook.rank.record.value_sampling import FIRST_STEPS, ValueSampling
from ddp_notebook.records.schema import SAMPLE
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import itertools, threading, time

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.buckets import Backward

OFF, META, VALUES, ALL = range(4)  # indices of `messages.record_options.LEVELS`
# Maximum number of large records that wait for the recorder's thread. A remaining small copy can keep the C library
# from reusing the memory of a freed large tensor (10 MB each, measured while all_reduces of fresh 10 MB tensors were
# recorded).
MOST = 2_000
_OF_REDUCER = torch.int32  # dtype of the bucket indices that DDP sends; elements of other dtypes may be gradients
_MOST_WAITING = 100_000  # maximum number of waiting records
_MOST_LOGGED = 20_000  # a loop that only logs waits while more records are queued
_PATIENCE_S = 2.0  # if no record is taken for this time, the loop continues and the oldest records are dropped
_LOOK_S = 0.002
_MANY = 2000  # number of records that are sent soon: a batch
_MANY_LARGE = MOST // 2  # the same if the last is large: later ones must not reach `MOST`


new = tuple.__new__  # faster than the constructor of a `NamedTuple`, which is a Python function


class EventBuffer:
    """Event buffer of one rank. `recorder` adds calls, `training` adds spans, and `metrics` adds logged values.

    Args:
        cells: files of cells, by name.
        modules: names of modules.
    """

    def __init__(self, cells: dict[str, int], modules: Modules | None = None) -> None:
        self.level = VALUES
        self.full_bytes = 0  # maximum bytes of a tensor that is kept as a whole; 0 for none
        self.thinning = ValueSampling()
        self.thins = True  # sample tensor values, if the level is `VALUES`
        self.moment = Moment(0, 0, 0, KEPT)
        self.has_begun = False  # a forward or a backward has run since the last optimizer step
        self.sees_forwards = False  # a DDP or FSDP model has run a forward in this cell
        self.backward: Backward | None = None  # the running backward; the last started one of several
        self.repeating = Repeating()
        # Lets the buckets of a backward use the fast path, see `repeats`.
        self.repeat: Callable[[Backward], None] = lambda _: None
        self.bucket: tuple[str, int] | None = None  # bucket of the user's comm hook that is running
        self.counts_elements = False  # count the elements in calls that are not of a DDP bucket
        self.elements = 0
        self.dropped = 0
        self.puts = self.taken = 0  # numbers of added and of removed records
        self._is_taken = True  # False if the last wait for the recorder's thread timed out
        self.filled = threading.Event()  # wakes the recorder's thread
        self.hurries = threading.Event()  # the records must be sent soon
        self.is_filled = False  # `filled.is_set()`, but faster; the recorder's thread resets it
        self.engine: CodeType | None = None  # torch's last Python function before autograd's C++ code
        self.modules = Modules() if modules is None else modules
        self._sequences = Known()
        self._sites = CallSites(cells, self.modules)
        self._moving = threading.Lock()  # for changes of the moment: steps may run in several threads
        self.collectors: list[Callable[[], None]] = []  # functions that add the events which have ended
        self._records: deque[Any] = deque()
        self._large: deque[int] = deque()  # for each large record that may wait: the value of `puts` after it
        self._calls = itertools.count(1)
        self.spans = itertools.count(1)  # numbers for new spans

    @property
    def is_steady(self) -> bool:
        """Return whether a training loop runs for long, so that steps need not be shown one by one."""
        return self.thins and self.moment.step >= FIRST_STEPS

    # ---- records

    def put(self, record: Any, *, is_large: bool = False, hurries: bool = False) -> None:
        """Add a record. If too many are waiting, the oldest are dropped.

        Args:
            is_large: the record contains a copy of a large tensor.
            hurries: send the record soon.
        """
        records = self._records
        too_many = 1 if len(records) >= _MOST_WAITING else 0
        if is_large:
            too_many = max(too_many, self._make_room())
            self._large.append(self.puts + 1)
        if too_many:
            gone = rows_of(self.pop(too_many))  # first: the recorder's thread may reset `dropped`
            self.dropped += gone
        records.append(record)
        self.puts += 1
        if not self.is_filled:
            self.is_filled = True
            self.filled.set()
        if (hurries or len(records) > (_MANY_LARGE if is_large else _MANY)) and not self.hurries.is_set():
            self.hurries.set()

    def _make_room(self) -> int:
        """Return the number of oldest records to drop before one more large record may wait."""
        large = self._large
        try:
            while large[0] <= self.taken:
                large.popleft()
            return large.popleft() - self.taken if len(large) >= MOST else 0
        except IndexError:  # none waits, or another thread was faster
            return 0

    def hold_back(self) -> None:
        """Wait until the recorder's thread has taken records, if a loop logs faster than that thread works."""
        if len(self._records) < _MOST_LOGGED or not self._is_taken:
            return
        until, before = time.monotonic() + _PATIENCE_S, self.taken
        while len(self._records) >= _MOST_LOGGED and self.level != OFF:
            if self.taken != before:
                until, before = time.monotonic() + _PATIENCE_S, self.taken
            elif time.monotonic() > until:
                self._is_taken = False
                return
            time.sleep(_LOOK_S)

    def collect(self) -> None:
        """Add all events that have ended to the event buffer."""
        for collect in self.collectors:
            collect()

    def pop(self, most: int) -> list[Any]:
        """Remove the oldest records, and return them."""
        records, taken = self._records, []
        try:
            for _ in range(min(most, len(records))):
                taken.append(records.popleft())
        except IndexError:  # another thread was faster
            pass
        self.taken += len(taken)
        return taken

    def __len__(self) -> int:
        return len(self._records)

    def leave(self) -> None:
        """Stop recording in a child that the user has forked: no thread empties this buffer, and its locks may be
        held."""
        self.level = OFF
        self.filled, self.hurries = threading.Event(), threading.Event()
        self._records.clear()

    # ---- the moment

    def enter(self, cell: int, title: int, level: int = VALUES, *, thins: bool = True) -> None:
        """Start recording a cell.

        Args:
            level: `OFF`, `META`, `VALUES` or `ALL`.
            thins: leave out the tensor values of some steps if training is fast.
        """
        self.level, self.thins = level, thins and level == VALUES
        self._is_taken = True
        if self.thinning.turns or self.thinning.calls:
            self.thinning.begin_cell()
        else:
            self.thinning.since_ns = time.monotonic_ns()
        self.repeating.backward = None
        self.modules.found.clear()  # a module may belong to another model now
        self._sequences = Known()
        values = KEPT if level >= VALUES else NOT_ASKED_FOR
        self.backward = None
        self.has_begun = self.sees_forwards = False
        self.moment = Moment(cell, title, 0, values, self._begin_sequence(values))

    def end_cell(self) -> None:
        """End the recording of a cell, which may have stopped in the middle of a step."""
        with self._moving:
            now = self.moment
            self._end_sequence(now)
            self.moment = Moment(now.cell, now.title, now.step, now.values)

    def _begin_sequence(self, values: int) -> Sequence | None:
        """Start a step. Its forwards are marked unless its tensor values are left out."""
        is_marked = self.level != OFF and values != LEFT_OUT
        if is_marked is not self.modules.marks:
            self.modules.mark(is_marked)
        return Sequence(self._sequences, is_marked=is_marked) if self.thins else None

    def _end_sequence(self, moment: Moment) -> None:
        if moment.sequence is not None and moment.sequence.calls:
            moment.sequence.is_over = True
            self.put(moment.sequence)

    def count_step(self) -> Moment:
        """Count an optimizer step. Return the moment before it."""
        with self._moving:
            now = self.moment
            step = now.step + 1
            values, sequence = KEPT, now.sequence
            if self.level < VALUES:
                values = NOT_ASKED_FOR
            elif self.thins and not self.thinning.keeps(step):
                values = LEFT_OUT
            if values != LEFT_OUT or now.values != LEFT_OUT or sequence is None or sequence.calls != []:
                self._end_sequence(now)
                sequence = self._begin_sequence(values)  # otherwise the empty sequence continues
            self.moment = new(Moment, (now.cell, now.title, step, values, sequence))
            self.has_begun = False
        if self.backward is not None:  # the step ran inside this backward
            self.repeating.backward = None
        return now

    def go_back(self, backward: Backward, depth: int = 1) -> None:
        """Register a backward that starts.

        Args:
            depth: number of frames up to the caller of torch's backward.
        """
        backward.moment = now = self.moment
        self.has_begun = True
        backward.outer, self.backward = self.backward, backward
        self.repeating.backward = None
        is_usual = now.values == LEFT_OUT and not (backward.is_distributed or operator_modes() or function_modes())
        if is_usual and backward.recalls(partial(self._sites.line, sys._getframe(depth))):
            self.repeat(backward)

    def come_back(self, backward: Backward) -> None:
        """Remove a backward that has ended."""
        self.repeating.backward = None
        if self.backward is backward:  # otherwise a concurrent backward has started, whose `outer` is this one
            outer = backward.outer
            while outer is not None and outer.end_ns:
                outer = outer.outer
            self.backward, backward.outer = outer, None

    # ---- calls

    def site(self, depth: int) -> SiteFields:
        """Return the call site for the frame `depth` levels above. All calls of DDP's reducer in one backward have the
        same line."""
        backward = self.backward
        if backward is not None and backward.is_distributed and backward.site is not None:
            site = self._sites.site(depth + 1)
            return site if self._sites.is_of_cell(site) else backward.site
        if backward is None or backward.thread != threading.get_ident():
            site = self._sites.site(depth + 1)
            if backward is None or site[2] is not None:
                return site
            backward.site = backward.site or self._sites.of_thread(backward.thread)  # an autograd thread, for a GPU
            return (site[0], *backward.site[1:5], *site[5:])
        if sys._getframe(depth).f_code is not self.engine:  # a hook of the user
            return self._sites.site(depth + 1)
        if backward.site is None:
            backward.site = self._sites.site(depth + 1)
        return backward.site

    def begin(self, call: Call) -> None:
        """Record an operation that is about to start. Its site is known."""
        call.serial = next(self._calls)
        call.moment = moment = self.moment
        model = None
        call.backward = backward = self.backward
        if call.site[0] is REDUCER and backward is not None and self.bucket is None:
            model = backward.add_call(call)
        elif call.site[0] in MARKED and moment.sequence is not None:
            moment.sequence.add(call)
        if self.counts_elements and model is None and (at := call.kernel.at_tensors) is not None:
            tensors = flat(call.arguments[at])
            self.elements += sum(one.numel() for one in tensors if one.dtype is not _OF_REDUCER)
        self.thinning.calls += 1
        call.values = moment.values
        if self.thins:
            if self.thinning.keeps_of_line((id(call.site[2]), call.site[3])):
                call.values = KEPT
            elif model is not None and backward is not None and backward.can_learn(call) and self.engine is not None:
                model.learn(call, self.engine)
        if call.values == KEPT and (at := call.kernel.at_input) is not None:
            call.input = self._copy(call, 0, call.arguments[at])
        if gpu.is_in_use() and (at := call.kernel.at_tensors) is not None:
            call.marks = marks_of(call.arguments[at])

    def issued(self, call: Call, work: Any) -> None:
        """Record a started operation whose caller continues. Its future, if any, reports its end."""
        try:
            future = work.get_future()
        except RuntimeError:  # send, recv and reduce_scatter of gloo: their end is known only after a wait
            return
        if call.marks is not None:  # the wait, or the end of the backward, does the rest
            call.marks.end_with(future)
            return
        call.tells_its_end = True
        if call.is_of_backward:  # the end of the backward does the rest
            call.ends = []
            if future.done():
                call.ends.append(time.monotonic_ns())
            else:
                future.add_done_callback(noting_time(call.ends))
        elif future.done():  # otherwise its callback would run here, where it would drop an interrupt
            self._on_future(call, future)
        else:
            future.add_done_callback(partial(self._on_future, call))

    def _on_future(self, call: Call, future: Any) -> None:
        """Record the end of a call. Called in gloo's thread, before a waiting caller continues."""
        if call.end_ns:  # a wait with a timeout has ended first
            return
        end_ns = time.monotonic_ns()
        try:
            future.value()
            failed = False
        except Exception:
            failed = True
        unseen(self._end, call, failed, end_ns)
        if not call.is_waited_for:  # otherwise the waiting caller adds the call, with its waiting time
            self._leave(call)

    def end_backward(self, backward: Backward, failed: bool) -> None:
        """Record the end of a backward and of the calls of a DDP reducer in it.

        The backward has waited for these calls, and no code has used their tensors yet. If gloo's threads did this
        work, it would delay the next bucket.
        """
        if backward.again and failed:
            self._forget_again(backward)
        elif backward.again:
            self.end_again(backward)
        for call in backward.calls:
            if call.state != ISSUED:
                continue  # it could not start
            if call.marks is not None:  # later work of this thread waits for it; the events contain its end time
                call.marks = call.marks.ended()
            elif failed and call.work is not None and not call.is_done:
                call.is_of_backward = False
                self.issued(call, call.work)
                continue
            self._end(call, failed and call.has_failed, call.ends[0] if call.ends else backward.end_ns)
            self._leave(call)
        backward.calls.clear()

    def end_again(self, backward: Backward) -> None:
        """Record the end of fast-path calls, of a backward that has succeeded."""
        again, backward.serials = backward.again, self._calls
        self.thinning.calls += len(again)
        backward.is_over = backward.has_waited  # set first, see `Repeat.is_done`
        if backward.is_over:
            for _, _, _, kept in again:
                if kept:
                    kept[0] = None  # the future, see `Kept`

    def _forget_again(self, backward: Backward) -> None:
        """Turn the fast-path calls of a failed backward into normal calls."""
        self.thinning.calls += len(backward.again)
        backward.forget()
        for again in backward.again:
            call = again[0].alone(again)
            call.serial, call.values = next(self._calls), LEFT_OUT
            call.moment, call.backward = backward.moment, backward
            if call.work is None and not call.ends:  # it could not start
                self._end(call, True, backward.end_ns)
                self._leave(call)
            else:
                backward.calls.append(call)
        backward.again = []

    def ended(self, call: Call, failed: bool, since_ns: int) -> None:
        """Record that a caller has waited for a call since `since_ns`, or that the call could not start."""
        now_ns = time.monotonic_ns()
        call.blocked_ns += now_ns - since_ns
        call.work = None  # it holds the tensors, and the call may stay in the event buffer for a while
        if not call.end_ns:
            call.marks = call.marks and call.marks.ended()
            self._end(call, failed, now_ns)
        elif not call.is_waited_for:
            return
        call.is_waited_for = False
        self._leave(call)

    def forgotten(self, call: Call) -> None:
        """Record a call that no code has waited for, and that does not report its end. GPU events may still contain the
        end."""
        if not call.tells_its_end and not call.is_waited_for and call.state == ISSUED:
            call.compact()
            if call.marks is not None and call.marks.finish is not None:
                call.state = DONE
            else:
                call.marks, call.state = None, UNWAITED
            self._leave(call)

    def _leave(self, call: Call) -> None:
        """Add a call once. The waiting caller and the callback may both get here, since torch releases the GIL."""
        if not call.is_left:
            call.is_left = True
            is_large = call.whole or any(copy is not None and copy.numel > SAMPLE for copy in (call.input, call.output))
            self.put(call, is_large=bool(is_large))

    def _end(self, call: Call, failed: bool, end_ns: int) -> None:
        """Keep a copy of the output, and drop the tensors."""
        call.end_ns = end_ns
        call.state = FAILED if failed else DONE
        if call.shapes is None:
            if call.values == KEPT and not failed and (at := call.kernel.at_output) is not None:
                call.output = self._copy(call, 1, call.arguments[at])
            call.compact()

    def _copy(self, call: Call, side: int, value: Any) -> previews.Copy | None:
        try:
            tensors = flat(value)
            if gpu.is_in_use() and torch.cuda.is_current_stream_capturing():
                return None  # a copy would become a part of the captured graph, or break it
            if self.full_bytes:
                call.whole += tuple((side, one) for one in previews.whole(tensors, self.full_bytes))
            return previews.copy(tensors)
        except RuntimeError:  # a tensor that cannot be copied: the user's call must continue
            return None
