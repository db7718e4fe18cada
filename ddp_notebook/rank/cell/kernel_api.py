"""Every private interface of ipykernel and ipyparallel that a rank needs, in one place.

| what | why nothing public does it | without it |
|---|---|---|
| `Kernel._main_asyncio_lock` (7.x) | a `%%px` or a second cell would run inside an `await` of our cell | own lock |
| `Kernel.schedule_dispatch` (6.x) | the same | own lock |
| `Session.send` replaced on the instance | displays and widgets of our cells take our wire | they go to ipyparallel |
| `ZMQInteractiveShell.init_environment` without a shell | see `settle_environment` | a rank may crash as it starts |
| `ipkernel.sys`, replaced while a kernel is made | see `without_modules` | a rank has 12 MB more |
| what `ZMQInteractiveShell.set_parent` sets | see `Parents` | it is called for each cell |

`tests/test_private_interfaces.py` fails when one of them goes away.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import ModuleType
from typing import Any, cast

from ipykernel import ipkernel
from ipykernel.kernelbase import Kernel
from ipykernel.zmqshell import ZMQInteractiveShell

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import asyncio, contextlib

_own_locks: dict[int, asyncio.Lock] = {}


def settle_environment() -> None:
    """Give this process the variables that a kernel sets as it starts, while no other thread runs; those of debugpy and
    of figures are there already (`launch.environment.rank_env`).

    C code that connects to a store or a peer reads the environment without the GIL, and the group forms beside the
    engine's start. glibc before 2.41 frees the table of variables when one is added: of 1111 processes that connected
    while 50 were added, 7 crashed; of 817 in which these were there already, none (2 cores).
    Source: https://sourceware.org/bugzilla/show_bug.cgi?id=15607
    """
    with contextlib.suppress(AttributeError):
        ZMQInteractiveShell.init_environment(cast(Any, None))  # it needs no shell


def import_without_debugpy() -> None:
    """Before a fork: import what a kernel imports as it is made for its debugger, and not debugpy itself, which takes
    0.1 s: an engine has no channel for a debugger. (In a cell it can be imported all the same.)"""
    if "debugpy" in sys.modules:
        return
    sys.modules["debugpy"] = cast(ModuleType, None)  # then its import fails
    try:
        importlib.import_module("ipykernel.debugger")
    finally:
        del sys.modules["debugpy"]


class _WithoutModules:
    """`sys`, and no modules in it."""

    modules: dict[str, ModuleType] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


@contextlib.contextmanager
def without_modules() -> Iterator[None]:
    """In the block a kernel is made. It asks every module for its file, for a debugger that no engine has, and a
    process that was forked gets its own copy of each page that it looks at."""
    before = vars(ipkernel).get("sys", sys)
    vars(ipkernel)["sys"] = _WithoutModules()
    try:
        yield
    finally:
        vars(ipkernel)["sys"] = before


def run_in_turn(kernel: Any, work: Callable[..., Coroutine[Any, Any, None]], *args: Any, suspends: bool = True) -> None:
    """Run a coroutine function after what the kernel has to do already, and let nothing else run until it is over.

    Args:
        suspends: False for work that never awaits anything: it needs no task, and no lock while it runs.
    """
    if not hasattr(kernel, "_main_asyncio_lock") and hasattr(kernel, "schedule_dispatch"):
        kernel.schedule_dispatch(work, *args)
        return
    lock = getattr(kernel, "_main_asyncio_lock", None)
    if lock is None:
        lock = _own_locks.setdefault(id(kernel), asyncio.Lock())
    if not suspends and not lock.locked() and not _tasks:  # else what waits already goes first
        try:
            work(*args).send(None)
        except StopIteration:  # its end
            pass
        return

    async def in_turn() -> None:
        async with lock:
            await work(*args)

    _keep(asyncio.ensure_future(in_turn()))


_tasks: set[asyncio.Future[None]] = set()


def _keep(task: asyncio.Future[None]) -> None:
    """Keep a task until it is done: the event loop holds tasks weakly."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def request(message_id: str) -> dict[str, Any]:
    """The message by which a front end would have run a cell."""
    header = {
        "msg_id": message_id,
        "msg_type": "execute_request",
        "session": "ddp_notebook",
        "username": "",
        "version": "5.3",
    }
    return {"header": header, "parent_header": {}, "metadata": {}, "content": {"code": "", "silent": False}}


class Parents:
    """Tells a kernel which message it answers, so that displays and threads are known as a cell's.

    `set_parent` of a kernel also tells what only messages of ipyparallel's client concern, through traits: 57 us of
    each cell on 64 ranks of two cores, where no cache is warm.

    Args:
        kernel: the engine's.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._shell = shell = kernel.shell
        self._is_as_known = (
            type(kernel).set_parent is ipkernel.IPythonKernel.set_parent
            and type(shell).set_parent is ZMQInteractiveShell.set_parent
        )
        self._shows: tuple[Any, Any] | None = None  # hook and publisher, which have been told all that stays

    def set(self, parent: dict[str, Any]) -> None:
        """This message is answered from now on."""
        if self._shows is None:
            self._kernel.set_parent([], parent)
            if self._is_as_known:
                self._shows = self._shell.displayhook, self._shell.display_pub
            return
        Kernel.set_parent(self._kernel, [], parent)
        self._shell.parent_header = parent
        for shows in self._shows:
            shows.parent_header = parent["header"]

    def forget(self) -> None:
        """Somebody else has told the kernel."""
        self._shows = None


Take = Callable[[str, dict[str, Any], dict[str, Any], dict[str, Any], Sequence[Any]], bool]


def intercept_sends(session: Any, take: Take) -> None:
    """Offer every message that the kernel sends to `take(msg_type, content, parent_header, metadata, buffers)`. If that
    returns True, the message is not sent."""
    original = session.send

    def send(stream: Any, msg_or_type: Any, content: Any = None, parent: Any = None, *rest: Any, **more: Any) -> Any:
        if isinstance(msg_or_type, dict):
            msg_type = msg_or_type["header"]["msg_type"]
            body, header = msg_or_type.get("content"), msg_or_type.get("parent_header")
        else:
            msg_type, body = msg_or_type, content
            header = parent.get("header", parent) if isinstance(parent, dict) else None
        if take(msg_type, body or {}, header or {}, more.get("metadata") or {}, more.get("buffers") or ()):
            return None
        return original(stream, msg_or_type, content, parent, *rest, **more)

    session.send = send
