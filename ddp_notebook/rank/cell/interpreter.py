"""State of the Python interpreter that the rank itself needs, restored after the code of each cell.

Some replacements in `builtins` stay: many programs replace `print` so that only rank 0 prints. Other replacements would
break IPython or this package, and with them the rank.
"""

from __future__ import annotations

import _thread
import builtins
import operator
import sys
from collections.abc import Callable, Mapping
from sys import getprofile, getrecursionlimit, gettrace, setprofile, setrecursionlimit, settrace
from types import MethodType
from typing import Any

import zmq

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import COPIED, asyncio, contextlib, os, socket

_OF_PROGRAMS = {"print", "input", "open", "__import__", "_"}  # programs commonly replace these; `_` is a translation
_NEEDED = ("ddp_notebook", "sys", *COPIED)  # modules that the rank itself needs
_START_S = 1.0  # a new thread starts within this time
_RENEWED = "ddp_notebook: the selector of the event loop was closed while this cell ran; a new one replaces it"
_OF_A_CLASS = {"__new__", "__init_subclass__", "__subclasshook__", "__class_getitem__"}
_RECURSION_LIMIT = 500  # maximum number of frames that the end of a cell needs


class _Kept:
    """Snapshot of names of a module or a class. Each cell compares 250 of them, so the comparison runs in C.

    If most names of the namespace are compared, all its values are compared in order, without a lookup by name. Lookups
    are slow, because between two cells the names leave the CPU caches.

    Args:
        namespace: namespace of the module or class.
        values: name -> value.
    """

    def __init__(self, namespace: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self._namespace = namespace
        self._get = operator.itemgetter(*values)
        self._all = tuple(values.values())
        self._whole = tuple(namespace.values()) if len(namespace) < 2 * len(values) else None

    @property
    def has_changed(self) -> bool:
        """Return whether a name has another value or is missing. `==` would call methods of user objects."""
        now, whole = self._namespace.values(), self._whole
        if whole is not None and len(now) == len(whole) and all(map(operator.is_, now, whole)):
            return False
        try:
            return not all(map(operator.is_, self._get(self._namespace), self._all))
        except KeyError:  # a name is missing
            return True


class Interpreter:
    """Snapshot of this process's interpreter state. Create it when all state to preserve is set."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, Callable[[], object]] = {}
        self._registered: list[Any] = []  # keys of the loop's selector at the end of the previous cell
        self.on_new_selector: Callable[[], object] = lambda: None  # called when a new selector replaces a closed one
        self._closed_selectors: list[Any] = []  # kept: their deletion could close a descriptor that is reused
        self._own_methods(self._loop._selector)  # type: ignore[attr-defined]
        for wakes_by in ("_ssock", "_csock"):
            self._own_methods(getattr(self._loop, wakes_by, None))
        if (wakes := getattr(self._loop, "_ssock", None)) is not None:  # `call_soon_threadsafe` writes to it
            self.keep_reader(wakes.fileno(), self._loop._read_from_self)  # type: ignore[attr-defined]
        self._builtins = _Kept(vars(builtins), vars(builtins))
        self._import: Any = builtins.__import__  # the last `__import__` that worked
        self._all_modules = sys.modules
        self._modules = sys.modules.copy()
        self._get_needed = operator.itemgetter(*filter(_is_needed, self._modules))
        self._limit = getrecursionlimit()
        self._threading = sys.modules["threading"]
        threads = {name: value for name, value in vars(self._threading).items() if callable(value)}
        threads |= dict.fromkeys(("_trace_hook", "_profile_hook"))  # hooks for new threads
        classes = self._threading.Thread, self._threading.Event, self._threading.Condition
        self._of_threads = (
            (self._threading, _Kept(vars(self._threading), threads)),
            *((one, _Kept(vars(one), _methods(one))) for one in classes),
        )
        # The rank communicates with these classes. pyzmq looks them up at each call.
        self._zmq = _Kept(vars(zmq), {name: value for name, value in vars(zmq).items() if isinstance(value, type)})
        self._hooks = {name: getattr(sys, name) for name in ("excepthook", "displayhook", "unraisablehook")}

    def keep_reader(self, fd: int, callback: Callable[[], object]) -> None:
        """Make the event loop read this file descriptor again if a cell removed its reader."""
        self._readers[fd] = callback

    def _own_methods(self, of: Any) -> None:
        """Give a selector or socket of the event loop a class with its own methods, which cells cannot replace.

        If `socket.send` or `EpollSelector.select` fails or does nothing, no cell ends any more.
        """
        if of is None or type(of).__module__ not in ("selectors", "socket"):
            return
        members = {name: value for base in reversed(type(of).__mro__[:-1]) for name, value in _methods(base).items()}
        of.__class__ = type(type(of).__name__, (type(of),), {**members, "__slots__": ()})

    def put_back(self) -> list[str]:
        """Restore the interpreter state. Return lines about restored names that later cells would miss."""
        for get, set_to in ((gettrace, settrace), (getprofile, setprofile)):
            if get() is None:
                continue
            try:
                set_to(None)
            except BaseException:  # raised by the removed function
                set_to(None)
        lines = [*self.put_builtins_back("while this cell ran"), *self.put_threading_back("while this cell ran")]
        if sys.modules is not self._all_modules:  # imports and libraries use the one or the other
            sys.modules = self._all_modules
        try:
            self._get_needed(sys.modules)
        except KeyError:  # a module is missing
            self._put_modules_back()
        if getrecursionlimit() < _RECURSION_LIMIT:
            setrecursionlimit(self._limit)
        if getattr(self._loop, "_stopping", False):  # the cell called `loop.stop()`, which would end the rank
            self._loop._stopping = False  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):  # an attribute of the loop was replaced: it fails, and is restored
            if self.renew_selector():
                lines.append(_RENEWED)
            self._put_readers_back()
            self._registered = list(self._loop._selector.get_map().values())  # type: ignore[attr-defined]
        for name, hook in self._hooks.items():
            if not callable(getattr(sys, name, None)):
                setattr(sys, name, hook)
        if self._zmq.has_changed:
            vars(zmq).update(self._zmq.values)
        return lines

    def renew_selector(self) -> bool:
        """Replace the selector of the event loop if a cell has closed it. Return whether it was closed."""
        loop: Any = self._loop
        selector = loop._selector
        if _is_open(selector):
            return False
        keys = list(getattr(selector, "_fd_to_key", {}).values()) or self._registered
        self._closed_selectors.append(selector)
        loop._selector = type(selector)()  # with its own methods, too
        for key in keys:
            with contextlib.suppress(OSError, ValueError, KeyError):  # the cell has closed this file, too
                loop._selector.register(key.fileobj, key.events, key.data)
        self.on_new_selector()
        return True

    def _put_readers_back(self) -> None:
        wakes: Any = getattr(self._loop, "_ssock", None)
        if wakes is not None and -1 in (wakes.fileno(), self._loop._csock.fileno()):  # type: ignore[attr-defined]
            self._renew_wakeup_sockets(wakes)
        readers = self._loop._selector.get_map()  # type: ignore[attr-defined]
        for fd, callback in self._readers.items():
            if fd not in readers:
                self._loop._add_reader(fd, callback)  # type: ignore[attr-defined]  # the public one refuses the loop's own

    def _renew_wakeup_sockets(self, closed: Any) -> None:
        """Replace the closed sockets by which other threads wake the event loop."""
        loop: Any = self._loop
        for one in (closed, loop._csock):
            one.close()
        for fd in [fd for fd, call in self._readers.items() if call == loop._read_from_self]:
            del self._readers[fd]
            loop._selector.unregister(fd)  # the new sockets may get this number
        loop._ssock, loop._csock = sockets = socket.socketpair()
        for one in sockets:
            self._own_methods(one)
            one.setblocking(False)
        self.keep_reader(loop._ssock.fileno(), loop._read_from_self)

    def put_threading_back(self, when: str) -> list[str]:
        """Restore names in `threading` without which no thread can start. Return lines about them.

        Args:
            when: clause about the time of the replacement. A thread may have made it.
        """
        lines: list[str] = []
        for owner, kept in self._of_threads:
            if kept.has_changed:
                lines += self._put_names_of_threading_back(owner, kept.values, when)
        return lines

    def _put_modules_back(self) -> None:
        is_emptied = sys.modules.get("sys") is not sys  # later imports created second copies of modules
        missing = {name: one for name, one in self._modules.items() if is_emptied or name not in sys.modules}
        sys.modules.update(missing)

    def _put_names_of_threading_back(self, owner: Any, values: dict[str, Any], when: str) -> list[str]:
        """Restore replaced names only if threads no longer start. Other replacements, such as profiler hooks, stay."""
        changed = [name for name, value in values.items() if vars(owner).get(name) is not value]
        if _starts_threads(self._threading):
            return []
        theirs = {name: vars(owner)[name] for name in changed if name in vars(owner)}
        for name in changed:
            setattr(owner, name, values[name])
        if not _starts_threads(self._threading):  # threads fail for another reason, such as a limit
            for name, value in theirs.items():
                setattr(owner, name, value)
            return []
        replaced = f"{_were(changed, ' in threading')} replaced {when}"
        return [f"ddp_notebook: no new thread could start after {replaced}; {_they_were(changed)} put back"]

    def put_builtins_back(self, when: str) -> list[str]:
        """Restore names in `builtins`, except those that programs commonly replace. Return lines about them.

        Takes 10 us if nothing changed.

        Args:
            when: clause about the time of the replacement. A thread may have made it.
        """
        if not self._builtins.has_changed:
            return []
        now, changed = vars(builtins), []
        for name, value in self._builtins.values.items():
            replacement = now.get(name)
            stays = name in _OF_PROGRAMS and callable(replacement) and not self._cannot_import(name, replacement)
            if replacement is not value and not stays:
                now[name] = value
                changed.append(name)
        if not changed:
            return []
        replaced = f"{_were(changed, ' in builtins')} replaced {when}"
        return [f"ddp_notebook: {replaced}; {_they_were(changed)} put back"]

    def _cannot_import(self, name: str, replacement: Any) -> bool:
        """Return whether this is an `__import__` that does not import, so that no later cell could run.

        Each replacement is tested once.
        """
        if name != "__import__" or replacement is self._import:
            return False
        try:
            if replacement("sys", {}, {}, (), 0) is not sys:
                return True
        except BaseException:  # it may raise KeyboardInterrupt
            return True
        self._import = replacement
        return False


def _methods(cls: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if callable(value) and name not in _OF_A_CLASS}


def _is_open(selector: Any) -> bool:
    """Return whether the file descriptor of a selector of asyncio is open and belongs to it."""
    polled = getattr(selector, "_selector", None)
    if polled is None or getattr(polled, "closed", False):
        return polled is None  # the `select` function has no descriptor
    try:
        return os.readlink(f"/proc/self/fd/{polled.fileno()}").endswith("[eventpoll]")
    except FileNotFoundError:
        return not os.path.isdir("/proc/self/fd")


def _is_needed(module: str) -> bool:
    """Return whether each cell checks for this module.

    Programs remove whole packages, so deeper modules are not checked, but restored with their package.
    """
    package, _, below = module.partition(".")
    return module in _NEEDED or (package == _NEEDED[0] and "." not in below)


def _starts_threads(threading: Any) -> bool:
    """Return whether new threads of this module start. A replaced `Thread` may raise any error, or never return."""
    begun = _thread.allocate_lock()
    begun.acquire()
    failed: list[BaseException] = []

    def start() -> None:
        try:
            ran: list[bool] = []
            thread = threading.Thread(target=lambda: ran.append(True), name="ddp-try", daemon=True)
            thread.start()
            thread.join(_START_S)
            if ran:
                begun.release()
        except BaseException as error:
            failed.append(error)
            if begun.locked():
                begun.release()

    try:
        _thread.start_new_thread(start, ())
    except RuntimeError:  # no thread can start
        return False
    return begun.acquire(timeout=_START_S) and not failed


def put_names_back(namespace: dict[str, Any], needed: dict[str, Any], when: str) -> list[str]:
    """Restore names that IPython needs in the namespace of cells, if IPython cannot use their current values.

    Args:
        namespace: namespace of cells.
        needed: name -> original value.
        when: clause about the time of the replacement. A thread may have made it.

    Returns:
        Lines about the restored names.
    """
    changed = [name for name, value in needed.items() if not _will_do(namespace.get(name), value)]
    for name in changed:
        namespace[name] = needed[name]
    if not changed:
        return []
    pronoun = "it" if len(changed) == 1 else "them"
    return [
        f"ddp_notebook: {_were(changed)} replaced {when}; IPython needs {pronoun}, so {_they_were(changed)} put back"
    ]


def _will_do(found: Any, needed: Any) -> bool:
    """Return whether IPython can use the current value of a name.

    A list or dict may be another one of the same type, but not of a subclass, whose methods may raise. `__builtins__`
    may also be a dict, because cloudpickle converts it.
    """
    if found is needed:
        return True
    kind = type(needed)
    if kind is MethodType:  # `get_ipython`
        return type(found) is kind and found.__self__ is needed.__self__ and found.__func__ is needed.__func__
    if needed is builtins:
        return found is vars(builtins)
    return type(found) is kind


def _were(names: list[str], where: str = "") -> str:
    """Return subject and verb of a sentence about names: "len in builtins was"."""
    return f"{', '.join(names)}{where} {'was' if len(names) == 1 else 'were'}"


def _they_were(names: list[str]) -> str:
    return "it was" if len(names) == 1 else "they were"


def write_to_stderr(line: str) -> None:
    """Write a line to file descriptor 2, because a cell may have replaced `print` and `sys.stderr`."""
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        pass  # the cell has closed it
