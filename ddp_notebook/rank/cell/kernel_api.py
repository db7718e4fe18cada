"""All private interfaces of ipykernel and ipyparallel that a rank needs.

| interface | purpose, not available publicly | fallback |
|---|---|---|
| `Kernel._main_asyncio_lock` (7.x) | keeps `%%px` or another cell from running inside an `await` of our cell | own lock
|
| `Kernel.schedule_dispatch` (6.x) | the same | own lock |
| `Session.send`, replaced on the instance | sends displays and widgets of our cells to the notebook | ipyparallel gets
them |
| `ZMQInteractiveShell.init_environment` without a shell | see `settle_environment` | a rank may crash at startup |
| `ipkernel.sys`, replaced while a kernel is created | see `without_modules` | a rank needs 12 MB more memory |
| attributes that `ZMQInteractiveShell.set_parent` sets | see `Parents` | it is called for each cell |

`tests/test_private_interfaces.py` fails if one of them changes.
"""

from __future__ import annotations

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
    """Set the environment variables that a kernel sets at startup, while no other thread runs.

    Variables for debugpy and figures are already set (`launch.environment.rank_env`). C code that connects to a store
    or a peer reads the environment without the GIL, and the group forms while the engine starts. glibc before 2.41
    frees the table of variables when one is added, so a concurrent reader may crash.
    Source: https://sourceware.org/bugzilla/show_bug.cgi?id=15607
    """
    with contextlib.suppress(AttributeError):
        ZMQInteractiveShell.init_environment(cast(Any, None))  # it does not use the shell


class _WithoutModules:
    """Proxy of `sys` with an empty `modules`."""

    modules: dict[str, ModuleType] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


@contextlib.contextmanager
def without_modules() -> Iterator[None]:
    """Context for creating a kernel without a scan of `sys.modules`.

    For a debugger, the kernel reads the file of every module. An engine has no debugger, and in a forked process each
    read page would be copied.
    """
    before = vars(ipkernel).get("sys", sys)
    vars(ipkernel)["sys"] = _WithoutModules()
    try:
        yield
    finally:
        vars(ipkernel)["sys"] = before


def run_in_turn(kernel: Any, work: Callable[..., Coroutine[Any, Any, None]], *args: Any, suspends: bool = True) -> None:
    """Run a coroutine function after pending work of the kernel, and block other work until it ends.

    Args:
        kernel: kernel of the engine.
        work: coroutine function.
        args: its arguments.
        suspends: False for a coroutine that never suspends; it needs neither a task nor the lock.
    """
    if not hasattr(kernel, "_main_asyncio_lock") and hasattr(kernel, "schedule_dispatch"):
        kernel.schedule_dispatch(work, *args)
        return
    lock = getattr(kernel, "_main_asyncio_lock", None)
    if lock is None:
        lock = _own_locks.setdefault(id(kernel), asyncio.Lock())
    if not suspends and not lock.locked() and not _tasks:  # otherwise pending work comes first
        try:
            work(*args).send(None)
        except StopIteration:  # end of the coroutine
            pass
        return

    async def in_turn() -> None:
        async with lock:
            await work(*args)

    _keep(asyncio.ensure_future(in_turn()))


_tasks: set[asyncio.Future[None]] = set()


def _keep(task: asyncio.Future[None]) -> None:
    """Hold a reference to a task until it is done, because the event loop holds tasks weakly."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def request(message_id: str) -> dict[str, Any]:
    """Return the message with which a front end would request a cell."""
    header = {
        "msg_id": message_id,
        "msg_type": "execute_request",
        "session": "ddp_notebook",
        "username": "",
        "version": "5.3",
    }
    return {"header": header, "parent_header": {}, "metadata": {}, "content": {"code": "", "silent": False}}


class Parents:
    """Sets the parent message of a kernel, which assigns displays and threads to a cell.

    `set_parent` of a kernel also sets traits that only matter for ipyparallel's client. This would take 57 us per cell
    with 64 ranks on two cores.

    Args:
        kernel: kernel of the engine.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._shell = shell = kernel.shell
        self._is_as_known = (
            type(kernel).set_parent is ipkernel.IPythonKernel.set_parent
            and type(shell).set_parent is ZMQInteractiveShell.set_parent
        )
        self._shows: tuple[Any, Any] | None = None  # display hook and publisher, if their constant attributes are set

    def set(self, parent: dict[str, Any]) -> None:
        """Make this message the parent of all following output."""
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
        """Force a full `set_parent` next time, because another component changed the parent."""
        self._shows = None


Take = Callable[[str, dict[str, Any], dict[str, Any], dict[str, Any], Sequence[Any]], bool]


def intercept_sends(session: Any, take: Take) -> None:
    """Call `take(msg_type, content, parent_header, metadata, buffers)` for every message that the kernel sends.

    If it returns True, the message is not sent.
    """
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
