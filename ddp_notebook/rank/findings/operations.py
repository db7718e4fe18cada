"""Asynchronous operations of the user: those that are never waited for, and those whose tensors change before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import _getframe
from typing import Any

import torch
from torch.distributed import distributed_c10d

from ddp_notebook.rank.group.call_site import USER
from ddp_notebook.rank.group.calls import Call
from ddp_notebook.rank.group.operators import flat
from ddp_notebook.rank.record.training.step_observer import tell
from ddp_notebook.rank.record.training.wrapping import around, passed_over
from ddp_notebook.stdlib import weakref

_RETURNS_WORK = distributed_c10d.__file__  # other functions of torch wait themselves, also in C++
_MOST = 256
_OWN = __name__.partition(".")[0] + "."  # modules of this package

_Tensors = list[tuple[Callable[[], Any], int]]  # weak references, with the version of each tensor


class Operations:
    """Asynchronous operations of the running cell.

    Args:
        note: keeps a fact.
        line: returns the user's line of a call.
        begun: called with each collective of the user before it begins.
    """

    def __init__(
        self, note: Callable[..., None], line: Callable[[Call], str], begun: Sequence[Callable[[Call], None]]
    ) -> None:
        self._note = note
        self._line = line
        self._begun = begun
        self.calls: dict[int, tuple[Call, _Tensors]] = {}  # calls without a wait so far
        around(torch.distributed.Work, "get_future", self._around_get_future)

    def begun(self, call: Call) -> None:
        """Report a collective."""
        for look in self._begun:
            tell(look, call)

    def issued(self, call: Call) -> None:
        """Add a call whose work torch returns to the user."""
        tell(self._issued, call)

    def _issued(self, call: Call) -> None:
        if not _is_of_user(call) or len(self.calls) >= _MOST:
            return
        at = call.kernel.at_tensors
        tensors = flat(call.arguments[at]) if at is not None and call.arguments else ()
        is_plain = not torch.is_inference_mode_enabled()
        versions: _Tensors = [(weakref.ref(one), one._version) for one in tensors if is_plain and _is_whole(one)]
        self.calls[id(call)] = call, versions

    def waited(self, call: Call) -> None:
        """Look at the tensors of a call before its wait returns."""
        tell(self._waited, call)

    def _waited(self, call: Call) -> None:
        found = self.calls.pop(id(call), None)
        if found is None or found[0] is not call:
            return
        for reference, version in found[1]:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                self._note("written-before-wait", 0, call=call.kernel.spec.name, line=self._line(call))

    def forgotten(self, call: Call) -> None:
        """Note a completed call without a wait, if the user has dropped its work."""
        tell(self._forgotten, call)

    def _forgotten(self, call: Call) -> None:
        found = self.calls.pop(id(call), None)
        if found is None or found[0] is not call or call.kernel.spec.kind == "send" or not call.is_dropped:
            return
        self._note("never-waited", 0, call=call.kernel.spec.name, line=self._line(call))

    def _around_get_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            if self.calls and not str(_getframe(1).f_globals.get("__name__")).startswith(_OWN):
                for key, (call, _) in list(self.calls.items()):
                    if call.work is work:  # the user may wait for the future instead
                        self.calls.pop(key, None)
            return original(work)

        return passed_over(get_future)

    def end_cell(self) -> None:
        """Note the calls that the cell has dropped."""
        for call, _ in list(self.calls.values()):
            self.forgotten(call)
        self.calls.clear()


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all elements of its storage. Tensors that share a storage share its version too."""
    return tensor.layout is torch.strided and tensor.nbytes == tensor.untyped_storage().nbytes()


def _is_of_user(call: Call) -> bool:
    """Return whether the user has called the function of torch that returned the work."""
    site = call.site
    return site is not None and site[0] is USER and site[1] is not None and site[1].co_filename == _RETURNS_WORK
