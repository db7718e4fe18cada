"""Compare the calls of all ranks on the ledger of their group, without a wait: operation, size and meaning.

If a call differs from that of a rank that was earlier, it does not start. The reason is published, and all connections
of the process are closed. So every thread of every rank that uses the group gets the same error, and no process ends
inside gloo. Calls that the guard compares on its board are only compared with calls of libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_notebook.rank.group.call_site import MARKED
from ddp_notebook.rank.group.calling_threads import MAIN, name_of
from ddp_notebook.rank.group.calls import Call, CollectiveMismatchError, Group
from ddp_notebook.rank.group.collective_owners import Identities
from ddp_notebook.rank.group.guard.board import Board
from ddp_notebook.rank.group.guard.ledger import SLOTS, CallDifference, Ledger
from ddp_notebook.rank.group.modules import ROOT
from ddp_notebook.records.threads import advice
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_IN = " in "  # before the name of a thread, which is empty for threads of C++
_OF_CHECKPOINT = "plan of a checkpoint"


class Order:
    """Comparison of the order of calls.

    Args:
        identities: objects that collectives belong to.
        place_of: returns the line of a call; "" if it is unknown.
        cut: closes the connections of this process.
    """

    def __init__(self, identities: Identities, place_of: Callable[[Call], str], cut: Callable[[], object]) -> None:
        self._identities = identities
        self._place_of = place_of
        self._cut = cut

    def check(self, call: Call, board: Board[Any], *, is_guarded: bool) -> None:
        """Post a call that is about to start.

        Args:
            is_guarded: the guard compares the call too.

        Raises:
            CollectiveMismatchError: another rank has started another call at this position, or a rank has found such a
                difference.
        """
        ledger = board.ledger
        assert ledger is not None
        if board.is_cut and (reason := ledger.reason):
            raise CollectiveMismatchError(reason)
        call.entry = self.entry(call, ledger, is_guarded=is_guarded)
        if (found := ledger.post(call.number, call.entry)) is not None:
            self.differs(call, found)

    def differs(self, call: Call, found: CallDifference) -> None:
        """End the operations of all ranks if a difference is certainly wrong.

        Raises:
            CollectiveMismatchError: it is.
        """
        if not _is_error(found):
            return
        board = call.group.board
        assert board is not None and board.ledger is not None
        reason = self._reason(call, found, board.rank)
        board.ledger.end(reason)
        self._cut()
        raise CollectiveMismatchError(board.ledger.reason or reason)

    def claim(self, group: Group, rank: int, identity: int, names: Sequence[str]) -> None:
        """Compare the order of an object's parameters with that of other ranks.

        Args:
            group: the group over which the object is distributed.
            rank: this rank in that group.
            identity: identity of the object.
            names: names of its parameters.

        Raises:
            CollectiveMismatchError: another rank has the same names in another order.
        """
        board = group.board
        if board is None or (ledger := board.ledger) is None:
            return
        meaning = self._identities.meaning(identity, group.name).bits
        mine = ", ".join(names)
        if not meaning or (found := ledger.claim(meaning, names, mine)) is None:
            return
        other, theirs = found
        orders = {group.ranks[other]: theirs, group.ranks[rank]: mine[: len(theirs)] if len(theirs) > 200 else mine}
        parts = [f"{order} on rank {one}" for one, order in sorted(orders.items())]
        what = self._identities.name(identity, group.name)
        ledger.end(
            f"the parameters of {what} have another order on each rank, and ranks would "
            f"exchange different parameters: {'; '.join(parts)}. Create them in the same order on all ranks. The "
            "operations were ended on all ranks; the next cell can use the group"
        )
        self._cut()
        raise CollectiveMismatchError(ledger.reason)

    def entry(self, call: Call, ledger: Ledger, *, is_guarded: bool) -> int:
        """Return the entry of a call in the ledger."""
        kernel, site = call.kernel, call.site
        if site is not None and not call.identity:
            call.identity = site[6]
        module = site[5] if site is not None and site[0] in MARKED else ""  # of tensor parallel
        tensor = None
        if kernel.at_tensors is not None and not kernel.spec.uneven:
            tensor = call.arguments[kernel.at_tensors]
            while type(tensor) is list and len(tensor) == 1:
                tensor = tensor[0]
        dtype, numel = (tensor.dtype, tensor.numel()) if isinstance(tensor, torch.Tensor) else (None, 0)
        code, instruction = (None, 0) if site is None else (site[2], site[3])
        has_threads = len(call.group.threads) > 1
        what = id(kernel), dtype, numel, call.identity, module
        key = (*what, id(code), instruction, call.thread, is_guarded, has_threads)
        entries = ledger.entries
        if (known := entries.get(key)) is None:
            if len(entries) >= SLOTS:
                entries.clear()
            identities, group = self._identities, call.group.name
            meaning = identities.meaning(call.identity, group)
            if module and not meaning.bits:
                meaning = identities.meaning_of_module(module, group)
            operation = f"{kernel.spec.name}{dtype}{numel}"
            entry = ledger.entry(
                self._describe(call),
                operation,
                meaning,
                is_guarded=is_guarded,
                of_thread=call.thread != MAIN,
                has_threads=has_threads,
            )
            known = entries[key] = entry, code
        return known[0]

    def _describe(self, call: Call) -> str:
        operation = call.describe()
        about = operation.meaning
        module = call.site[5] if call.site is not None else ""
        if name := self._identities.name(call.identity, call.group.name, "" if module == ROOT else module):
            about = f"{about.removesuffix(f' of {module}')} of {name}" if about else name
        place = self._place_of(call).partition(", in ")[0]
        inside = ", ".join(filter(None, (operation.what, about, place)))
        return f"{operation.name}({inside}){_IN}{name_of(call.thread)}"

    def _reason(self, call: Call, found: CallDifference, rank: int) -> str:
        group = call.group
        mine, my_thread = _parts(found.mine)
        theirs, their_thread = _parts(found.theirs)
        threads = sorted({my_thread, their_thread} - {""})
        has_threads = found.has_threads and len(threads) > 1
        if has_threads:
            mine, theirs = f"{mine}{_IN}{my_thread}", f"{theirs}{_IN}{their_thread}"
        calls = {group.ranks[found.rank]: theirs, group.ranks[rank]: mine}
        parts = [f"rank {rank} calls {what}" for rank, what in sorted(calls.items())]
        sentence = (
            f"collective #{call.number} of group {group.title} is not the same on all ranks: {'; '.join(parts)}. "
        )
        if has_threads:
            remedy = advice(mine + theirs, is_of_checkpoint=_OF_CHECKPOINT in mine + theirs)
            sentence += f"Two threads use this group, and each rank starts their calls in another order: {remedy}. "
        elif not found.is_operation:
            sentence += "The sizes are equal, so both would get a mixture of the two. "
        return f"{sentence}The operations were ended on all ranks; the next cell can use the group"


def _is_error(found: CallDifference) -> bool:
    """Return whether a difference is certainly wrong, and the guard does not raise a better error."""
    if found.is_operation:
        return not found.is_guarded or found.has_threads
    return found.is_thread or found.is_meaning


def _parts(text: str) -> tuple[str, str]:
    """Return the call and the thread of a description."""
    call, _, thread = text.rpartition(_IN)
    return call, thread
