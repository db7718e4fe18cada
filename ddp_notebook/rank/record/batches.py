"""From what the tape holds to rows: names, shapes, lines and values, in the recorder's own thread."""

from __future__ import annotations

import bisect
import dis
import functools
import json
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch

from ddp_notebook.rank.group.calls import Call, Group
from ddp_notebook.rank.group.operators import nbytes
from ddp_notebook.rank.group.origin import REDUCER, Site
from ddp_notebook.rank.record import previews
from ddp_notebook.rank.record.gpu_times import GpuClock
from ddp_notebook.rank.record.metrics import Logged
from ddp_notebook.rank.record.tape import HAS_DEVICES, Moment
from ddp_notebook.rank.record.training.buckets import Layout
from ddp_notebook.rank.record.training.comm_hooks import Hooked
from ddp_notebook.rank.record.training.stretches import Gradient, Span
from ddp_notebook.records.codec import Batch, Tensor
from ddp_notebook.records.schema import ORIGINS, REDUCE_OPS, TABLES
from ddp_notebook.records.schema import Rows as TableRows

_ORIGIN = {name: code for code, name in enumerate(ORIGINS)}
_REDUCE_OP = {name: code for code, name in enumerate(REDUCE_OPS)}
_YIELD_EVERY = 8  # records: 0.1 ms
_MOST_KNOWN = 5_000  # kinds of calls that are remembered
_Constants = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]  # columns of a call before its number, ...
_MOST_TEXTS = 200_000  # that a process numbers
# A row as bytes: of a tuple NumPy makes a row in twice the time.
_FORMATS = {"u1": "B", "b1": "?", "i2": "h", "i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f4": "f", "f8": "d"}
_PACK = {
    table: struct.Struct("<" + "".join(_FORMATS[dtype[column].str[1:]] for column in dtype.names or ())).pack
    for table, dtype in TABLES.items()
    if table != "value"
}
_log = logging.getLogger(__name__)
_INSIDE = {"_engine_run_backward": "backward", "_call_impl": "forward"}  # what users call them


class Rows:
    """Makes batches. One per process.

    Args:
        rank: tells this rank's number, which changes when the group is formed anew.
        describe: words for calls as (file, line, function) and the number of the cell, see `where`.
    """

    def __init__(self, rank: Callable[[], int], describe: Callable[[list[tuple[str, int, str]], int], str]) -> None:
        self._rank_of = rank
        self._describe = describe
        self._texts: dict[str, int] = {"": 0}
        self._new: dict[int, str] = {}
        self._sites: dict[tuple[int, ...], tuple[str, Site]] = {}
        self._known_calls: dict[tuple[Any, ...], tuple[_Constants, Any]] = {}
        self._shapes: dict[tuple[torch.Size, ...], int] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._threads = {threading.main_thread().ident: 0}
        self._gpu_clock = GpuClock()
        self._late: list[Any] = []  # whose values, or times, have not arrived from a GPU

    @property
    def rank(self) -> int:
        return self._rank_of()

    @property
    def has_late(self) -> bool:
        """Whether something has not arrived from a GPU."""
        return bool(self._late)

    def batch(self, records: Sequence[Any], dropped: int = 0, resources: Sequence[tuple[Any, ...]] = ()) -> Batch:
        """The batch of these records, and of earlier ones that have arrived since."""
        rank = self.rank
        rows: dict[str, list[bytes]] = {name: [] for name in _PACK}
        values = _Values()
        tensors: list[Tensor] = []
        records, self._late = [*self._late, *records], []
        for number, record in enumerate(records):
            if number % _YIELD_EVERY == 0:
                time.sleep(0)  # a thread that trains may wait for the interpreter: it would get it after 5 ms
            try:
                self._add(rank, record, rows, values, tensors)
            except Exception:  # the others of its batch are told all the same
                _log.info("a record was lost", exc_info=True)  # the report counts it
                dropped += 1
        rows["resource"] += [_PACK["resource"](*one) for one in resources]
        tables = {table: np.frombuffer(b"".join(some), TABLES[table]) for table, some in rows.items() if some}
        if values.copies:
            tables["value"] = values.rows(rank, lambda dtype: self._text(_dtype(dtype)))
        new, self._new = self._new, {}
        return Batch(
            rank=rank,
            stream=os.getpid(),
            dropped=dropped,
            texts=new,
            tables=tables,
            tensors=tuple(tensors),
        )

    # ---- rows

    def _add(
        self, rank: int, record: Any, rows: dict[str, list[bytes]], values: _Values, tensors: list[Tensor]
    ) -> None:
        """Put one record where it belongs; what has not arrived waits for the next batch."""
        kind = type(record)
        if kind is Call:
            if not _has_arrived(record):
                self._late.append(record)
                return
            rows["call"].append(_PACK["call"](*self._call(rank, record)))
            serial = record.serial
            if record.input is not None:
                values.add(record.input, serial, 0)
            if record.output is not None:
                values.add(record.output, serial, 1)
            for side, whole in record.whole:
                (part,) = whole.parts
                data, dtype = previews.array_of(part).tobytes(), _dtype(part.dtype)
                tensors.append(Tensor(call=serial, side=side, dtype=dtype, shape=tuple(part.shape), data=data))
        elif kind is Logged:
            if record.event is not None and not record.event.query():
                self._late.append(record)
                return
            name, moment = self._text(record.name), record.moment
            row = rank, name, moment.cell, record.step, float(record.value), record.time_ns
            rows["metric"].append(_PACK["metric"](*row))
        elif kind is Span:
            rows["span"].append(_PACK["span"](*self._span(rank, record)))
        elif kind is Gradient:
            if not previews.has_arrived(record.copy):
                self._late.append(record)
                return
            values.add(record.copy, record.span, record.side, self._text(record.name))
        elif kind is Hooked:
            rows["call"].append(_PACK["call"](*self._hooked(rank, record)))
        elif kind is Layout:
            model, buckets = self._text(record.model), self._text(record.buckets)
            rows["layout"].append(_PACK["layout"](rank, record.time_ns, model, buckets, record.is_rebuilt))

    def _call(self, rank: int, call: Call) -> tuple[Any, ...]:
        moment = call.moment
        assert moment is not None
        what, how, whose = self._constants(call, moment)
        start_ns, end_ns = call.since_ns, call.end_ns or -1
        if call.marks is not None:
            start_ns, end_ns = self._gpu_clock.times_ns(call.marks)
        elif call.is_of_backward:
            end_ns = _end_ns(end_ns, moment)
        backward = 0 if moment.backward is None else moment.backward.number
        return (
            call.serial,
            rank,
            *what,
            call.number,
            *how,
            backward,
            moment.cell,
            moment.step,
            call.since_ns,
            start_ns,
            end_ns,
            call.blocked_ns,
            call.state,
            *whose,
        )

    def _constants(self, call: Call, moment: Moment) -> _Constants:
        """What is the same for all calls of one line with tensors of one shape: worked out once (6 of 10 us a call)."""
        kernel, group, rest, bucket, shapes = call.kernel, call.group, call.rest, call.bucket, call.shapes
        assert shapes is not None
        origin, api, code, instruction, cell, module = call.site
        dtype, inputs, outputs = shapes
        key: tuple[Any, ...] = (
            *(id(kernel), id(group), bucket, call.thread, moment.title, id(api), id(code), instruction, module, dtype),
            *(tuple(inputs), tuple(outputs)),
        )
        if cell is not None:
            key += id(cell[0]), cell[1]
        if bucket is None:  # else DDP's reducer calls it, which has its own ways
            key += (*kernel.facts_of(rest), origin, moment.backward is None)
        found = self._known_calls.get(key)
        if found is None:
            if len(self._known_calls) > _MOST_KNOWN:
                self._known_calls.clear()
            constants = self._work_out(call, Site(*call.site), moment)
            found = self._known_calls[key] = constants, (kernel, group, call.site)  # which keeps what these ids are of
        return found[0]

    def _work_out(self, call: Call, site: Site, moment: Moment) -> _Constants:
        kernel, group, rest = call.kernel, call.group, call.rest
        assert call.shapes is not None
        dtype, inputs, outputs = call.shapes
        api = _api(site.api)
        module, bucket = (site.module, -1) if call.bucket is None else call.bucket
        peer = group.session_rank(kernel.root_of(rest))
        is_async = api.startswith(("i", "batch_i")) if kernel.spec.kind != "collective" else not kernel.blocks(rest)
        what = self._text(kernel.spec.name), self._text(api), self._group(group)
        how = (
            _REDUCE_OP.get(kernel.reduce_op_of(rest), 0),
            -1 if peer is None else peer,
            kernel.tag_of(rest),
            self._text(_dtype(dtype)),
            self._shapes_text(outputs if kernel.spec.shows_output else inputs),
            nbytes(inputs, dtype),
            nbytes(outputs, dtype),
            self._origin(call, site),
            self._text(self._site(site, moment.title)),
            self._text(module),
            bucket,
        )
        return what, how, (is_async, self._thread(call.thread))

    def _hooked(self, rank: int, one: Hooked) -> tuple[Any, ...]:
        """A bucket of a user's comm hook has a row too, with the number 0; what the hook calls has its own."""
        moment = one.moment
        return (
            0,
            rank,
            self._text(f"comm hook {one.hook}"),
            self._text(one.hook),
            0,
            0,
            0,
            -1,
            0,
            0,
            0,
            one.nbytes,
            one.nbytes,
            _ORIGIN["ddp hook"],
            0,
            self._text(one.model),
            one.bucket,
            one.backward,
            moment.cell,
            moment.step,
            one.start_ns,
            one.start_ns,
            _end_ns(one.end_ns, moment),
            0,
            1,
            True,
            0,
        )

    def _origin(self, call: Call, site: Site) -> int:
        name = site.origin
        if call.bucket is not None:
            name = "ddp"
        elif name == REDUCER:
            name = "ddp" if call.moment is not None and call.moment.backward is not None else "torch"
        return _ORIGIN.get(name, _ORIGIN["torch"])

    def _span(self, rank: int, span: Span) -> tuple[Any, ...]:
        moment = span.moment
        return (
            span.span,
            rank,
            span.kind,
            self._text(span.name),
            moment.cell,
            moment.step,
            span.start_ns,
            span.end_ns,
            span.samples,
            self._thread(span.thread),
        )

    # ---- texts

    def _text(self, text: str) -> int:
        number = self._texts.get(text)
        if number is None and len(self._texts) >= _MOST_TEXTS:
            text = "(too many different texts)"
            number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._texts)
            self._new[number] = text
        return number

    def _group(self, group: Group) -> int:
        key = (group.name, group.ranks)
        number = self._groups.get(key)
        if number is None:
            words = {"name": group.name, "title": group.title, "ranks": group.ranks}
            number = self._groups[key] = self._text(json.dumps(words))
        return number

    def _shapes_text(self, shapes: Sequence[torch.Size]) -> int:
        key = tuple(shapes)
        number = self._shapes.get(key)
        if number is None:
            if len(self._shapes) > 10_000:
                self._shapes.clear()
            number = self._shapes[key] = self._text(json.dumps([list(shape) for shape in shapes]))
        return number

    def _site(self, site: Site, title: int) -> str:
        code, cell = site.code, site.cell
        if code is None:
            return ""
        # A code object's own hash takes 2 us.
        key = (id(code), site.instruction, title, *((id(cell[0]), cell[1]) if cell else ()))
        found = self._sites.get(key)
        if found is None:
            if len(self._sites) > 10_000:
                self._sites.clear()
            calls = [
                (of.co_filename, _line(of, instruction), of.co_name)
                for of, instruction in filter(None, ((code, site.instruction), cell))
            ]
            words = self._describe(calls, title)
            if not words:  # a script's
                words = f"{os.path.basename(calls[0][0])}:{calls[0][1]} in {calls[0][2]}"
            found = self._sites[key] = (words, site)  # which keeps the objects of these ids
        return found[0]

    def _thread(self, ident: int) -> int:
        return self._threads.setdefault(ident, len(self._threads))


class _Values:
    """What was in tensors, and whose it is: columns, since tuples would take longer."""

    def __init__(self) -> None:
        self.copies: list[previews.Copy] = []
        self._of: list[int] = []  # the call, or the span of a gradient's backward
        self._sides: list[int] = []
        self._names: list[int] = []

    def add(self, copy: previews.Copy, of: int, side: int, name: int = 0) -> None:
        self.copies.append(copy)
        self._of.append(of)
        self._sides.append(side)
        self._names.append(name)

    def rows(self, rank: int, number_of: Callable[[torch.dtype], int]) -> TableRows:
        """Rows of `records.VALUE`."""
        rows = previews.rows_of(self.copies, number_of)
        rows["rank"], rows["call"], rows["side"], rows["name"] = rank, self._of, self._sides, self._names
        return rows


def _has_arrived(call: Call) -> bool:
    """Whether all that a GPU is to tell of it is there."""
    if not HAS_DEVICES:
        return True
    if call.marks is not None and not call.marks.has_happened:
        return False
    copies = (call.input, call.output, *(one for _, one in call.whole))
    return all(copy is None or previews.has_arrived(copy) for copy in copies)


def _end_ns(end_ns: int, moment: Moment) -> int:
    """When something ended that the backward waits for. It is told in a thread of gloo's, which may get the interpreter
    only after the main thread has gone on."""
    backward = moment.backward
    return end_ns if backward is None or not 0 < backward.end_ns < end_ns else backward.end_ns


def _api(code: CodeType | None) -> str:
    """What users call it: of a constructor the class."""
    if code is None:
        return ""
    name = code.co_qualname.rpartition(".")[0] if code.co_name == "__init__" else code.co_name
    return _INSIDE.get(name, name)


@functools.lru_cache(1000)
def _dtype(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


@functools.lru_cache(1000)
def _lines(code: CodeType) -> tuple[list[int], list[int]]:
    found = [(at, line) for at, line in dis.findlinestarts(code) if line is not None]
    return [at for at, _ in found], [line for _, line in found]


def _line(code: CodeType, instruction: int) -> int:
    starts, lines = _lines(code)
    return lines[max(0, bisect.bisect_right(starts, instruction) - 1)] if lines else code.co_firstlineno
