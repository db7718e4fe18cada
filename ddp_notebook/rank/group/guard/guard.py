"""Compare the number of a call, its operation, the dtype and shape of its tensors, and its root between ranks.

For sends and receives, see `messages`.

Without a check, gloo kills the rank with the smaller buffer. It accepts a wrong dtype, and the result is wrong without
an error. torch's own check (`TORCH_DISTRIBUTED_DEBUG=DETAIL`) costs 3 ms a call and makes DDP wait for each bucket.

The guard compares a hash of each rank's call on the group's board. If the hashes differ, the ranks exchange
descriptions of their calls. In an all_to_all, ranks may pass different sizes, but each must be the size that the
receiver expects. So these sizes are exchanged too. Both exchanges require that the call blocks on every rank, which
each mark contains: ranks may wait for non-blocking calls in different orders.

Operations of DDP, FSDP and DTensor overlap with the backward, and must not wait. `order` compares them. DDP's
broadcasts are an exception, since they overlap with nothing. If a rank calls a DDP model alone, its broadcasts would
match any calls of the other ranks. They are compared if ranks share memory.

An asynchronous call is compared when its caller waits for it; by then it has sent its data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
)

from ddp_notebook.rank.group.call_site import USER, is_of_nn_functional, origin
from ddp_notebook.rank.group.calls import LONG, Call, CollectiveMismatchError
from ddp_notebook.rank.group.guard.board import Board, Compared
from ddp_notebook.rank.group.guard.inputs import FINE, MEMORY_ORDER, Checked, check, check_message
from ddp_notebook.rank.group.guard.ledger import Ledger
from ddp_notebook.rank.group.guard.memory_board import BoardCutError, BoardTimeoutError, MemoryBoard
from ddp_notebook.rank.group.guard.message_comparison import Messages, nbytes_of, what_of
from ddp_notebook.rank.group.guard.order import Order
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.records.words import group_by_value, name_ranks
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import time, zlib


class _Comparison(NamedTuple):
    """A comparison in progress."""

    work: Any
    smallest: npt.NDArray[np.int64]  # (3,) minima of h, of -h, and of whether the caller waits


class PrivateBoard:
    """Board that uses its own gloo group, see `board.Board`. Closing gloo's connections also cuts this board.

    Args:
        store: store of the group.
        rank, size: in the group.
        room: maximum length of a note in bytes.
        timeout: how long a rank waits for the others, now and later.
    """

    def __init__(self, store: Store, rank: int, size: int, room: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.messages: Messages | None = None  # not compared: each message would need another one
        self.ledger: Ledger | None = None
        self._room = room
        self._group: Any = ProcessGroupGloo(PrefixStore("guard/", store), rank, size, timeout=timeout)
        self._least = AllreduceOptions()
        self._least.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]  # torch's stub has its own enum
        self._all = AllgatherOptions()

    def post(self, mark: int, blocks: bool) -> _Comparison:
        smallest = np.array((mark, -mark, int(blocks)))  # NumPy memory, which torch profiles do not show
        return _Comparison(self._group.allreduce([torch.from_numpy(smallest)], self._least), smallest)

    def compare(self, ticket: _Comparison) -> Compared:
        ticket.work.wait()
        low, high, all_block = ticket.smallest.tolist()
        return Compared(low == -high, bool(all_block))

    def swap(self, ticket: _Comparison, note: bytes) -> list[bytes]:
        note = note[: self._room]
        mine = torch.zeros(8 + self._room, dtype=torch.uint8)
        framed = len(note).to_bytes(8, "little") + note
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([everybody], [mine], self._all).wait()
        raw = [bytes(one.tolist()) for one in everybody]
        return [one[8 : 8 + int.from_bytes(one[:8], "little")] for one in raw]

    def set_timeout(self, timeout: timedelta) -> None:
        self._group._set_default_timeout(timeout)

    def hold_timeout(self, on: bool) -> None:
        self._least.timeout = self._all.timeout = LONG if on else _OF_GROUP

    @property
    def is_cut(self) -> bool:
        """Return False: nothing interrupts a rank that waits in gloo."""
        return False

    def spoil(self) -> None:
        """Do nothing: nothing interrupts a rank that waits in gloo."""

    def cut(self) -> None:
        """Do nothing: the connections belong to gloo."""


_OF_GROUP = AllreduceOptions().timeout  # stands for the timeout of the group
_UNCHECKED = {"monitored_barrier"}  # this is a check itself
_WORDS_BYTES = 384
_BYTES_A_RANK = 16  # bytes that a rank sends to and receives from each rank in an all_to_all
_DDP = "ddp"
_IN_FORWARD = " for a model in DDP"
_PROBLEM = "!"  # starts the note of a call whose tensors would give a wrong result
_NOT_SENT = "This rank has sent nothing"
_UNCHANGED = "Nothing was sent, and the group can be used"
_WRONG = 0  # mark of a call whose tensors would give a wrong result
_FRAMES_OF_OURS = 5  # frames of `origin`, `_maker_of`, `Guard.__call__`, and two of the kernel


class Guard:
    """Comparison of the calls of a group's ranks. `guard(call)` runs before the call.

    Args:
        loss: returns the error that operations raise because of dead ranks; None if all ranks live.
        order: compares all calls without a wait.

    Returns:
        Tensors with which a send or receive starts instead of its own, if the two do not match; otherwise None.

    Raises:
        CollectiveMismatchError: raised on every rank, with a description of the difference.
        ValueError: a tensor would give a wrong result, see `inputs`. It is raised on every rank that waits.
    """

    def __init__(self, loss: Callable[[], BaseException | None], order: Order) -> None:
        self._loss = loss
        self._order = order

    def __call__(self, call: Call) -> Sequence[torch.Tensor] | None:
        kernel, group = call.kernel, call.group
        if kernel.spec.name in _UNCHECKED or len(group.ranks) < 2 or (board := group.board) is None:
            return None
        maker, messages = _maker_of(call), board.messages
        if kernel.spec.kind != "collective":
            if maker == USER:
                unseen(check_message, call)
            return None if messages is None else unseen(_fit, call, messages, maker == USER)
        is_of_forward = maker == _DDP and kernel.spec.name == "broadcast" and messages is not None
        is_guarded = maker == USER or is_of_forward
        if board.ledger is not None:
            unseen(self._order.check, call, board, is_guarded=is_guarded)
        if not is_guarded:
            return None
        began_ns = time.monotonic_ns()
        blocks = is_of_forward or kernel.blocks(call.arguments[kernel.at_rest :])  # DDP waits for it in C++
        try:
            checked, ticket = unseen(_post, board, call, blocks, is_of_forward)
            if blocks:
                unseen(self._compare, board, ticket, call, maker, checked)
        except (CollectiveMismatchError, ValueError):
            raise
        except BaseException as error:  # an interrupt: possibly only some ranks have posted this call
            board.spoil()
            if isinstance(error, BoardCutError) and (loss := self._loss()) is not None:
                raise loss from None  # the other rank died while this one waited
            raise
        if blocks:
            call.blocked_ns += time.monotonic_ns() - began_ns  # time of waiting for slower ranks
        else:
            call.check = lambda _: unseen(self._compare, board, ticket, call, maker, checked)
        return None

    def _compare(self, board: Board[Any], ticket: Any, call: Call, maker: str, checked: Checked) -> None:
        try:
            is_same, all_block = board.compare(ticket)
        except BoardTimeoutError as error:
            late = call.group.ranks[error.rank]
            raise RuntimeError(
                f"Timed out waiting {error.limit_s:g} s for rank {late} to call {call.kernel.spec.name} #{call.number} "
                f"of group {call.group.title}. Application timeout caused pair closure"
            ) from None
        if not all_block:  # no exchange then: a rank that waits later may wait for another call first
            if checked.problem:
                raise ValueError(f"{checked.problem}. {_NOT_SENT}")
            if not is_same:
                raise CollectiveMismatchError(
                    f"{call.describe().short} {_words(call, checked)} differs from the collective that another rank "
                    "calls"
                )
        elif not is_same or checked.problem:
            self._raise_difference(board, ticket, call, maker, checked)
        elif call.kernel.spec.uneven:
            self._compare_sizes(board, ticket, call)

    def _compare_sizes(self, board: Board[Any], ticket: Any, call: Call) -> None:
        """Raise an error unless each rank sends as many bytes to each other rank as that rank expects."""
        size = board.size
        mine = np.zeros((2, size), np.int64)  # bytes that this rank sends to each rank, and receives from each
        gives, takes = _exchanged(call, size)
        if len(gives) == len(takes) == size:  # otherwise they cannot match
            mine[:] = gives, takes
        everybody = np.array([np.frombuffer(one, np.int64).reshape(2, size) for one in board.swap(ticket, bytes(mine))])
        more = everybody[:, 0] - everybody[:, 1].T  # (sender, receiver) bytes that exceed those expected
        if more.any():
            giver, taker = np.argwhere(more)[0]
            count, ranks = int(more[giver, taker]), call.group.ranks
            raise CollectiveMismatchError(
                f"collective #{call.number} of group {call.group.title} does not match: rank {ranks[giver]} sends rank "
                f"{ranks[taker]} {abs(count)} bytes {'more' if count > 0 else 'less'} than it receives. "
                "Nothing was sent, and the group can be used"
            )

    def _raise_difference(self, board: Board[Any], ticket: Any, call: Call, maker: str, checked: Checked) -> None:
        """Exchange descriptions with the other ranks, and raise an error with all of them."""
        words = _words(call, checked) + (_IN_FORWARD if maker == _DDP else "")
        mine = f"{_PROBLEM} {checked.problem}" if checked.problem else f"{call.number} {words}"
        notes = board.swap(ticket, mine.encode()[:_WORDS_BYTES])
        said = [note.decode(errors="replace").partition(" ") for note in notes]
        numbers = {rank: number for rank, (number, _, _) in zip(call.group.ranks, said, strict=True)}
        calls = {rank: what for rank, (_, _, what) in zip(call.group.ranks, said, strict=True)}
        problems = {rank: calls[rank] for rank, number in numbers.items() if number == _PROBLEM}
        if problems:
            raise ValueError(f"{_join(problems, len(calls))}. {_UNCHANGED}")
        if len(set(calls.values())) == 1 and len(set(numbers.values())) > 1:
            parts = [f"#{number} on {name_ranks(ranks)}" for number, ranks in group_by_value(numbers).items()]
            raise CollectiveMismatchError(
                f"{call.kernel.spec.name} is collective {' and '.join(parts)} of group {call.group.title}: some ranks "
                "have called more than others before it. Nothing was sent"
            )
        parts = [
            f"{name_ranks(ranks)} call{'s' * (len(ranks) == 1)} {what}" for what, ranks in group_by_value(calls).items()
        ]
        every = "".join(calls.values())
        raise CollectiveMismatchError(
            f"collective #{call.number} of group {call.group.title} is not the same on all ranks: {'; '.join(parts)}. "
            "Nothing was sent, and the group can be used"
            + ("; to compute on one rank alone, call model.module(x)" if _IN_FORWARD in every else "")
            + ("; pass x.contiguous() on all ranks" if MEMORY_ORDER in every else "")
        )


def _join(problems: Mapping[int, str], size: int) -> str:
    """Return the problems of ranks as one sentence, with the ranks unless all have the same one."""
    by_text = group_by_value(problems)
    if len(by_text) == 1 and len(problems) == size:
        return next(iter(by_text))
    return "; ".join(f"on {name_ranks(ranks)}, {text}" for text, ranks in by_text.items())


def make_board(group: ProcessGroup, store: Store, timeout: timedelta) -> Board[Any]:
    """Return the board of a group. It is made together with the group on all its ranks.

    If it were made at the group's first use, that use would wait for all ranks. In a correct program, some of them may
    be waiting for another operation.

    Args:
        store: store of that group.
        timeout: how long a rank waits for the others, now and later.
    """
    rank, size = group.rank(), group.size()
    room = max(_WORDS_BYTES, size * _BYTES_A_RANK)
    return MemoryBoard.make(store, rank, size, room, timeout) or PrivateBoard(store, rank, size, room, timeout)


def _post(board: Board[Any], call: Call, blocks: bool, is_of_forward: bool) -> tuple[Checked, Any]:
    """Check the tensors of a call and post its mark. Return the result of the check and the ticket."""
    checked = FINE if is_of_forward else check(call, board.rank)  # DDP's own tensors are right
    ticket = board.post(_mark(call, checked), blocks)
    if checked.problem and not blocks:  # the other ranks may not wait yet
        raise ValueError(f"{checked.problem}. {_NOT_SENT}")
    return checked, ticket


def _maker_of(call: Call) -> str:
    maker = call.site[0] if call.site else origin(_FRAMES_OF_OURS)
    return USER if maker == "torch" and is_of_nn_functional() else str(maker)


def _mark(call: Call, checked: Checked) -> int:
    return _WRONG if checked.problem else zlib.crc32(_signature(call, checked.order)) or 1


def _signature(call: Call, order: str) -> bytes:
    """Return the data that must be equal on all ranks of the group, and nothing else."""
    kernel = call.kernel
    shapes: Any = ""
    dtype: Any = ""
    if kernel.at_tensors is not None:
        tensors = call.arguments[kernel.at_tensors]
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if tensors else None
        while isinstance(tensor, list | tuple):
            tensor = tensor[0] if tensor else None
        if tensor is not None:
            dtype = tensor.dtype
            if not kernel.spec.uneven:
                shapes = tensor.shape
    rest = call.arguments[kernel.at_rest :]
    root = kernel.root_of(rest)
    return f"{call.number} {kernel.spec.name}{dtype}{kernel.reduce_op_of(rest)}{root}{shapes}{order}".encode()


def _exchanged(call: Call, size: int) -> tuple[list[int], list[int]]:
    """Return the bytes that an all_to_all sends to each rank, and those that it receives from each."""
    kernel, arguments = call.kernel, call.arguments
    assert kernel.at_input is not None and kernel.at_output is not None
    tensors = arguments[kernel.at_input], arguments[kernel.at_output]
    if kernel.spec.name == "all_to_all":
        gives, takes = ([one.nbytes for one in some] for some in tensors)
        return gives, takes
    splits = arguments[kernel.at_rest + 1], arguments[kernel.at_rest]  # the output's splits come first
    gives, takes = (
        [rows * (one.nbytes // max(len(one), 1)) for rows in sizes] if sizes else [one.nbytes // size] * size
        for one, sizes in zip(tensors, splits, strict=True)
    )
    return gives, takes


def _words(call: Call, checked: Checked) -> str:
    operation = call.describe()
    parts = [operation.reduce_op, "" if call.kernel.spec.uneven else operation.what]
    parts += [checked.order] if checked.order else []
    parts += [] if operation.root is None else [f"root {operation.root}"]
    inside = ", ".join(part for part in parts if part) or operation.dtype
    return f"{operation.name}({inside})"


def _fit(call: Call, messages: Messages, is_of_user: bool) -> Sequence[Any] | None:
    """Post a message for comparison. If the ranks disagree, return other tensors to send or fill.

    Args:
        is_of_user: if False, the message is only counted.
    """
    kernel, arguments, group = call.kernel, call.arguments, call.group
    rest, tensors = arguments[kernel.at_rest :], arguments[kernel.at_tensors or 0]
    if len(tensors) != 1 or not tensors[0].is_cpu or not tensors[0].is_contiguous():  # gloo refuses these
        return None
    kind, peer, tag = kernel.spec.kind, kernel.root_of(rest), kernel.tag_of(rest)
    if peer is None:
        what = what_of(tensors[0]) if is_of_user else 0
        messages.begin_from_any(tag)
        call.check = partial(messages.end_from_any, tag, what, group.ranks, group.title)
        return None
    posted = messages.post(kind, peer, tag, tensors[0])
    if posted is None or not is_of_user:
        return None
    call.check = partial(
        messages.compare, posted, group.ranks, group.title
    )  # holds no reference to the call, which would be a cycle
    other = messages.look(posted)
    if not other:
        return None
    room = 0 if kind == "send" else nbytes_of(other)  # receives the data of a sender that did not see the mismatch
    return [torch.empty(room, dtype=torch.uint8, device="cpu")]
