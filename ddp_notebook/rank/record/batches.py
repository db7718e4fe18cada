"""Batches: rows of names, shapes, lines and values, which the recorder's thread makes of the event buffer's records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch

from ddp_notebook.rank import gpu, remote_calls
from ddp_notebook.rank.group.call_site import REDUCER, CallSite
from ddp_notebook.rank.group.calls import DONE, LEFT_OUT, BackwardSpan, Call
from ddp_notebook.rank.group.kernels.repeats import Repeat
from ddp_notebook.rank.group.operators import nbytes
from ddp_notebook.rank.group.sequences import Moment
from ddp_notebook.rank.record import previews
from ddp_notebook.rank.record.gpu_times import GpuClock
from ddp_notebook.rank.record.metrics import LoggedValue
from ddp_notebook.rank.record.text_numbers import TextNumbers, dtype_name
from ddp_notebook.rank.record.training.buckets import Backward, BucketChange
from ddp_notebook.rank.record.training.comm_hooks import Hooked
from ddp_notebook.rank.record.training.gradients import ChosenGradient
from ddp_notebook.rank.record.training.loaders import DrawnIndices, Settings, summary_of
from ddp_notebook.rank.record.training.repeated_buckets import pack
from ddp_notebook.rank.record.training.spans import Span, span_of
from ddp_notebook.records.codec import Batch, Tensor
from ddp_notebook.records.schema import ORIGINS, REDUCE_OPS, TABLES, Rows
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import logging, secrets, struct, threading, time

_ORIGIN = {name: code for code, name in enumerate(ORIGINS)}
_REDUCE_OP = {name: code for code, name in enumerate(REDUCE_OPS)}
_YIELD_EVERY = 8  # records: 0.1 ms
_CALLS_AT_ONCE = 64  # remote calls: also 0.1 ms
_STREAM_BITS = 53  # integers of this size are exact in JSON
_MOST_KNOWN = 5_000  # kinds of calls whose columns are cached
_Columns = dict[str, Any]
# Rows are packed as bytes: NumPy takes twice as long to make a row of a tuple.
_FORMATS = {
    "u1": "B",
    "b1": "?",
    "i2": "h",
    "u2": "H",
    "i4": "i",
    "u4": "I",
    "i8": "q",
    "u8": "Q",
    "f4": "f",
    "f8": "d",
}
_PACK = {
    table: struct.Struct("<" + "".join(_FORMATS[dtype[column].str[1:]] for column in dtype.names or ())).pack
    for table, dtype in TABLES.items()
    if table != "value"
}
_BLANK: dict[str, _Columns] = {table: dict.fromkeys(TABLES[table].names or (), 0) for table in _PACK}
# Indices of the columns that differ between two calls of one kind.
_CALL, _RANK, _NUMBER, _BACKWARD, _CELL, _STEP, _ISSUE, _START, _END, _BLOCKED, _STATE, _LEFT_OUT = map(
    list(_BLANK["call"]).index,
    (
        *("call", "rank", "number", "backward", "cell", "step"),
        *("issue_ns", "start_ns", "end_ns", "blocked_ns", "state", "left_out"),
    ),
)
_INSIDE = {  # names that users know for internal functions of torch
    "_engine_run_backward": "backward",
    **dict.fromkeys(("_call_impl", "_prepare_input_fn", "_prepare_output_fn"), "forward"),
}
_log = logging.getLogger(__name__)


def _packed(table: str, **columns: Any) -> bytes:
    """Return a row as bytes. A missing column is 0, which means "" for a text."""
    return _PACK[table](*(_BLANK[table] | columns).values())


class BatchMaker:
    """Maker of batches. One per process.

    Args:
        rank: returns this rank's number, which may change when the group is re-formed.
        describe: describes calls, given as (file, line, function) and the number of the cell, see `where`.
    """

    def __init__(self, rank: Callable[[], int], describe: Callable[[list[tuple[str, int, str]], int], str]) -> None:
        self._rank_of = rank
        self._texts = TextNumbers(describe)
        self._known_calls: dict[tuple[Any, ...], tuple[list[Any], Any]] = {}
        self._threads = {threading.main_thread().ident: 0}
        self._gpu_clock = GpuClock()
        self._stream = secrets.randbits(_STREAM_BITS)  # a process id could be reused after a rank was replaced
        self._late: list[Any] = []  # records that wait for values or times of a GPU

    @property
    def rank(self) -> int:
        return self._rank_of()

    @property
    def late(self) -> Any:
        """Return the oldest record that waits for data of a GPU; None if there is none."""
        late = self._late
        return late[0] if late else None

    def tell_again(self) -> None:
        """Prepare for a new receiver, which has no texts."""
        self._texts.tell_again()

    def batch(self, records: Sequence[Any], dropped: int = 0, resources: Mapping[str, Any] | None = None) -> Batch:
        """Return the batch of these records, and of earlier records whose data have arrived since.

        Args:
            records: records from the event buffer.
            dropped: number of lost records so far. Records that fail here are added.
            resources: columns of a row of `records.RESOURCE`.
        """
        rank = self.rank
        rows: dict[str, list[bytes]] = {name: [] for name in _PACK}
        values = _Values()
        tensors: list[Tensor] = []
        records, self._late = [*self._late, *records], []
        for kind in remote_calls.COLUMNS:
            calls = [record for record in records if type(record) is kind]
            for first in range(0, len(calls), _CALLS_AT_ONCE):
                time.sleep(0)  # see below
                dropped += self._add_calls(rank, kind, calls[first : first + _CALLS_AT_ONCE], rows["rpc"])
        others = [record for record in records if type(record) not in remote_calls.COLUMNS]
        again: list[Backward] = []
        for number, record in enumerate(others):
            if number % _YIELD_EVERY == 0:
                time.sleep(0)  # a training thread may wait for the GIL, which it would otherwise get only after 5 ms
            if type(record) is Backward and record.again:
                again.append(record)
            if again and type(record) in (Call, Hooked):  # rows of calls keep their order
                dropped += self._add_again(rank, again, rows["call"])
            try:
                self._add(rank, record, rows, values, tensors)
            except Exception:  # the other records of the batch must not be lost
                _log.info("a record was lost", exc_info=True)  # the report counts it
                dropped += 1
        dropped += self._add_again(rank, again, rows["call"]) if again else 0
        if resources is not None:
            rows["resource"].append(_packed("resource", **resources))
        tables = {table: np.frombuffer(b"".join(some), TABLES[table]) for table, some in rows.items() if some}
        if values.copies:
            tables["value"] = values.rows(rank, self._texts.of_dtype)
        return Batch(
            rank=rank,
            stream=self._stream,
            dropped=dropped,
            texts=self._texts.take_new(),
            tables=tables,
            tensors=tuple(tensors),
        )

    def _has_arrived(self, call: Call) -> bool:
        """Return whether the times and values of a call have arrived from the GPU."""
        if not gpu.IS_BUILT:
            return True
        if (marks := call.marks) is not None and not (marks.has_happened and self._gpu_clock.is_set(marks.device)):
            return False
        copies = (call.input, call.output, *(one for _, one in call.whole))
        return all(copy is None or previews.has_arrived(copy) for copy in copies)

    # ---- rows

    def _add(
        self, rank: int, record: Any, rows: dict[str, list[bytes]], values: _Values, tensors: list[Tensor]
    ) -> None:
        """Add one record to its rows. A record whose data have not arrived waits for the next batch."""
        kind = type(record)
        if kind is Call:
            if not self._has_arrived(record):
                self._late.append(record)
                return
            rows["call"].append(self._call(rank, record))
            serial = record.serial
            if record.input is not None:
                values.add(record.input, serial, 0)
            if record.output is not None:
                values.add(record.output, serial, 1)
            for side, whole in record.whole:
                (part,) = whole.parts
                data, dtype = previews.array_of(part).tobytes(), dtype_name(part.dtype)
                tensors.append(Tensor(call=serial, side=side, dtype=dtype, shape=tuple(part.shape), data=data))
        elif kind is LoggedValue:
            if record.event is not None and not record.event.query():
                self._late.append(record)
                return
            rows["metric"].append(self._metric(rank, record))
        elif kind is Span:
            rows["span"].append(self._span(rank, record))
        elif kind is Backward and record.has_span:
            rows["span"].append(self._span(rank, span_of(record)))
        elif kind is ChosenGradient:
            if not previews.has_arrived(record.copy):
                self._late.append(record)
                return
            values.add(record.copy, record.span, record.side, self._texts.number(record.name))
        elif kind is Hooked:
            rows["call"].append(self._hooked(rank, record))
        elif kind is BucketChange:
            rows["layout"].append(self._layout(rank, record))
        elif kind is Settings:
            rows["loader"].append(self._loader(rank, record))
        elif kind is DrawnIndices:
            if (summary := summary_of(record.indices)) is not None:
                rows["indices"].append(self._indices(rank, record, summary))
        elif (table := remote_calls.TABLES.get(kind)) is not None:
            rows[table].append(_PACK[table](*remote_calls.row(record, rank, self._texts)))

    def _add_again(self, rank: int, again: list[Backward], rows: list[bytes]) -> int:
        """Add the rows of fast-path calls, and empty the list. Return the number of failed rows."""
        try:
            rows.append(pack(again, rank, self._repeated))
            return 0
        except Exception:  # the other records of the batch must not be lost
            _log.info("records were lost", exc_info=True)
            return sum(len(backward.again) for backward in again)
        finally:
            for backward in again:
                backward.again = []  # they hold tensors, and the last backward of a model stays alive
            again.clear()

    def _add_calls(self, rank: int, kind: type, calls: Sequence[Any], rows: list[bytes]) -> int:
        """Add the rows of remote calls of one kind. Return the number of failed rows."""
        try:
            rows += list(map(_PACK["rpc"], *remote_calls.COLUMNS[kind](calls, rank, self._texts, self._thread)))
        except Exception:  # the other records must not be lost
            if len(calls) > 1:
                return sum(self._add_calls(rank, kind, [one], rows) for one in calls)
            _log.info("a record was lost", exc_info=True)
            return 1
        return 0

    def _call(self, rank: int, call: Call) -> bytes:
        moment = call.moment
        assert moment is not None
        start_ns, end_ns = call.since_ns, call.end_ns or -1
        if call.marks is not None:
            start_ns, end_ns = self._gpu_clock.times_ns(call.marks)
        elif call.is_of_backward:
            end_ns = _end_ns(end_ns, call.backward)
        row = self._constants(call, moment).copy()
        row[_CALL], row[_NUMBER], row[_RANK] = call.serial, call.number, rank
        row[_BACKWARD] = 0 if call.backward is None else call.backward.number
        row[_CELL], row[_STEP] = moment.cell, moment.step
        row[_ISSUE], row[_START], row[_END] = call.since_ns, start_ns, end_ns
        row[_BLOCKED] = call.blocked_ns
        row[_STATE] = call.state
        row[_LEFT_OUT] = call.values == LEFT_OUT
        return _PACK["call"](*row)

    def _repeated(self, repeat: Repeat, backward: Backward) -> bytes:
        """Return the constant part of the rows of a fast-path bucket."""
        moment = backward.moment
        assert moment is not None
        row = self._constants(repeat, moment).copy()
        row[_STATE], row[_LEFT_OUT] = DONE, True
        return _PACK["call"](*row)

    def _constants(self, call: Call, moment: Moment) -> list[Any]:
        """Return a row with the columns that all calls of one line and shape share, and 0 in the other columns.

        It is cached, since it would take 6 of 10 us per call.
        """
        kernel, group, rest, bucket, shapes = call.kernel, call.group, call.rest, call.bucket, call.shapes
        assert shapes is not None
        origin, api, code, instruction, cell, module, _ = call.site
        dtype, inputs, outputs = shapes
        key: tuple[Any, ...] = (
            *(id(kernel), group.serial, bucket, call.thread, moment.title, id(api), id(code), instruction, module),
            *(dtype, tuple(inputs), tuple(outputs), call.meaning),
        )
        if cell is not None:
            key += id(cell[0]), cell[1]
        if bucket is None:  # otherwise a DDP reducer calls it, always in the same way
            key += (*kernel.facts_of(rest), origin, call.backward is None)
        found = self._known_calls.get(key)
        if found is None:
            if len(self._known_calls) > _MOST_KNOWN:
                self._known_calls.clear()
            constants = list(self._work_out(call, CallSite(*call.site), moment).values())
            found = constants, (kernel, call.site)  # the kernel and the site keep the objects of these ids alive
            self._known_calls[key] = found
        return found[0]

    def _work_out(self, call: Call, site: CallSite, moment: Moment) -> _Columns:
        kernel, group, rest, texts = call.kernel, call.group, call.rest, self._texts
        assert call.shapes is not None
        dtype, inputs, outputs = call.shapes
        api = _api(site.api)
        module, bucket = (site.module, -1) if call.bucket is None else call.bucket
        peer = group.session_rank(kernel.root_of(rest))
        is_async = api.startswith(("i", "batch_i")) if kernel.spec.kind != "collective" else not kernel.blocks(rest)
        return _BLANK["call"] | {
            "op": texts.number(kernel.spec.name),
            "api": texts.number(api),
            "group": texts.of_group(group),
            "reduce_op": _REDUCE_OP.get(kernel.reduce_op_of(rest), 0),
            "peer": -1 if peer is None else peer,
            "tag": kernel.tag_of(rest),
            "dtype": texts.of_dtype(dtype),
            "shapes": texts.of_shapes(outputs if kernel.spec.shows_output else inputs),
            "nbytes_in": nbytes(inputs, dtype),
            "nbytes_out": nbytes(outputs, dtype),
            "origin": self._origin(call, site),
            "site": texts.of_site(site, moment.title),
            "module": texts.number(call.meaning or module),
            "bucket": bucket,
            "is_async": is_async,
            "thread": self._thread(call.thread),
        }

    def _hooked(self, rank: int, one: Hooked) -> bytes:
        """Return the row of a bucket that a user's comm hook has synchronized. Such a call has no number.

        The collectives in the hook have their own rows.
        """
        moment = one.moment
        return _packed(
            "call",
            rank=rank,
            op=self._texts.number(f"comm hook {one.hook}"),
            api=self._texts.number(one.hook),
            peer=-1,
            nbytes_in=one.nbytes,
            nbytes_out=one.nbytes,
            origin=_ORIGIN["ddp hook"],
            module=self._texts.number(one.model),
            bucket=one.bucket,
            backward=0 if one.backward is None else one.backward.number,
            cell=moment.cell,
            step=moment.step,
            issue_ns=one.start_ns,
            start_ns=one.start_ns,
            end_ns=_end_ns(one.end_ns, one.backward),
            state=DONE,
            is_async=True,
        )

    def _origin(self, call: Call, site: CallSite) -> int:
        name = site.origin
        if call.bucket is not None:
            name = "ddp"
        elif name == REDUCER:
            name = "torch" if call.backward is None else "ddp"
        return _ORIGIN.get(name, _ORIGIN["torch"])

    def _span(self, rank: int, span: Span) -> bytes:
        number, kind, name, moment, start_ns, end_ns, samples, thread, place, is_training = span
        name_at, thread_at = self._texts.number(name), self._thread(thread)
        return _PACK["span"](
            *(number, rank, kind, name_at, moment.cell, moment.step, start_ns, end_ns, samples, thread_at, *place),
            is_training,
        )

    def _metric(self, rank: int, one: LoggedValue) -> bytes:
        name, value = self._texts.number(one.name), float(one.value)
        return _PACK["metric"](rank, name, one.moment.cell, one.step, value, one.time_ns, one.is_given, one.unit)

    def _layout(self, rank: int, one: BucketChange) -> bytes:
        return _packed(
            "layout",
            rank=rank,
            time_ns=one.time_ns,
            model=self._texts.number(one.model),
            buckets=self._texts.number(one.buckets),
            is_rebuilt=one.is_rebuilt,
        )

    def _loader(self, rank: int, one: Settings) -> bytes:
        columns = one._asdict()
        cell = columns.pop("moment").cell
        return _packed("loader", rank=rank, cell=cell, **columns | {"name": self._texts.number(one.name)})

    def _indices(self, rank: int, one: DrawnIndices, summary: tuple[int, int, int, int]) -> bytes:
        name = self._texts.number(one.name)
        return _PACK["indices"](rank, one.time_ns, name, one.moment.cell, one.moment.step, *summary)

    def _thread(self, ident: int) -> int:
        return self._threads.setdefault(ident, len(self._threads))


class _Values:
    """Tensor values and the calls that they belong to, in columns, since tuples are slower."""

    def __init__(self) -> None:
        self.copies: list[previews.Copy] = []
        self._of: list[int] = []  # for each copy: the call, or the span of a gradient's backward
        self._sides: list[int] = []
        self._names: list[int] = []

    def add(self, copy: previews.Copy, of: int, side: int, name: int = 0) -> None:
        self.copies.append(copy)
        self._of.append(of)
        self._sides.append(side)
        self._names.append(name)

    def rows(self, rank: int, number_of: Callable[[torch.dtype], int]) -> Rows:
        """Return rows of `records.VALUE`."""
        rows = previews.rows_of(self.copies, number_of)
        rows["rank"], rows["call"], rows["side"], rows["name"] = rank, self._of, self._sides, self._names
        return rows


def _end_ns(end_ns: int, backward: BackwardSpan | None) -> int:
    """Return the end time of an operation that its backward waits for.

    gloo's thread notes the time. It may get the GIL only after the main thread has continued.
    """
    return end_ns if backward is None or not 0 < backward.end_ns < end_ns else backward.end_ns


def _api(code: CodeType | None) -> str:
    """Return the name of a function as users know it; for a constructor that of its class."""
    if code is None:
        return ""
    name = code.co_qualname.rpartition(".")[0] if code.co_name == "__init__" else code.co_name
    return _INSIDE.get(name, name)
