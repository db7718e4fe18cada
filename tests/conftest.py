"""Shared fixtures: real sessions and kernels, and a check that each test leaves nothing behind.

`make test` runs the tests in workers of pytest-xdist, which are separate processes. Each worker has its own mark,
IPython folder and temporary folder, so it finds only its own leftovers.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_core.utils import run_sync

# All processes started by a test, directly or indirectly, inherit this mark. Every worker creates its own.
RUN_MARK = f"DDP_NOTEBOOK_TEST_RUN={uuid.uuid4().hex}"
os.environ.update([tuple(RUN_MARK.split("="))])  # type: ignore[list-item]  # two strings
os.environ.pop("PYTHONUNBUFFERED", None)  # it hides buffered output of C code
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, every process would compile the package
os.environ["DDP_NOTEBOOK_CONFIG"] = os.devnull  # ignore the defaults file of the developer
os.environ["IPYTHONDIR"] = tempfile.mkdtemp(prefix="ipython-")
atexit.register(shutil.rmtree, os.environ["IPYTHONDIR"], ignore_errors=True)
# Tests use CPU ranks; only those in `gpu` see the GPUs. A worker inherits both variables from its parent.
if "PYTEST_XDIST_WORKER" not in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ:
    os.environ["DDP_NOTEBOOK_TEST_GPUS"] = os.environ["CUDA_VISIBLE_DEVICES"]
VISIBLE_GPUS = os.environ.get("DDP_NOTEBOOK_TEST_GPUS")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # happens in background jobs of a shell script
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
_LEFTOVER_DEADLINE_S = 5.0
_STARTS_RANKS = {"session", "make_session", "kernel", "make_kernel", "ranks"}  # fixtures
# A test without any of these marks is a unit test, which `make test-unit` runs. It cannot start a process.
_NO_UNIT = ("long", "alone", "ranks", "browser", "gpu", "processes", "slow")
_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}  # audit events of this process
_LONG_FILES = {  # more than a minute each
    "tests/browser/test_lessons.py",
    "tests/browser/test_monitor.py",
    "tests/keep/test_kept.py",
    "tests/lessons/test_notebooks.py",
    "tests/recording/test_scripts.py",
    "tests/test_cell_table.py",
    "tests/test_lifetime.py",
    "tests/test_start.py",
    "tests/tools/test_demo.py",
}
_FILE_MARKS = re.compile(r"^pytestmark = (\[[^\]]*\]|[^\n#]*)", re.MULTILINE)
# Files with slow tests that share nothing: each of their tests may run in any worker.
_SHARE_NOTHING = {"tests/lessons/test_notebooks.py", "tests/recording/test_scripts.py"}


_MOST_ENVIRONMENT_BYTES = 100_000


def net_connections(process: psutil.Process) -> list[Any]:
    """Return the internet sockets of a process; psutil 5 calls the method `connections`."""
    find = getattr(process, "net_connections", None) or process.connections
    return list(find("inet"))


def waiting_host() -> Any:
    """Return the idle host server of this process, if there is one."""
    from ddp_notebook.launch import warm

    return warm._waiting if warm._waiting is not None and warm._waiting.is_alive else None


def marked_processes() -> set[psutil.Process]:
    """Return the living processes of this test run and of their OS sessions, except this process."""
    mark, own, found, sessions = RUN_MARK.encode(), os.getpid(), set(), set()
    everything = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in everything:
        try:
            fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY)
        except OSError:
            continue
        try:
            is_marked = mark in os.read(fd, _MOST_ENVIRONMENT_BYTES)
        except OSError:  # it has ended in the meantime
            continue
        finally:
            os.close(fd)
        if is_marked:
            found.add(pid)
            with contextlib.suppress(OSError):
                sessions.add(os.getsid(pid))
    if sessions := sessions - {os.getsid(0)}:
        for pid in everything:
            with contextlib.suppress(OSError):
                if os.getsid(pid) in sessions:
                    found.add(pid)
    living = set()
    for pid in found - {own}:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living


def wait_until(condition, timeout_s: float = 5.0, what: str | Callable[[], str] = "") -> None:
    """Wait for a condition with a deadline. The error has the text `what`, or the text that it returns."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= until:
            text = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s:g} s: {text or condition}")
        time.sleep(0.01)


def busy_factor() -> float:
    """Return how much longer a computation takes now than on an idle machine: about 3 for six processes on 2 cores."""
    began_s, cpu_s = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu_s < 0.1:
        pass
    return max(1.0, (time.monotonic() - began_s) / 0.1)


def is_within(took_s: float, limit_s: float) -> bool:
    """Return whether something took less than its limit, which is longer while other processes use the cores."""
    return took_s < limit_s or took_s < limit_s * busy_factor()


def below(folder: Path) -> list[Path]:
    """Return all files and folders below a folder. `rglob` fails if an entry is removed during the walk."""
    return [Path(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files)]


def sockets_of(pid: int) -> int:
    """Return the number of sockets of a process."""
    folder, links = f"/proc/{pid}/fd", []
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):  # it was closed in the meantime
            links.append(os.readlink(f"{folder}/{fd}"))
    return sum(link.startswith("socket:") for link in links)


# Counted before and after each test, without the idle host server, which may be replaced in between.


def _processes() -> set[psutil.Process]:
    found = marked_processes()
    if (host := waiting_host()) is not None:
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(host.pid)
            found -= {server, *server.children(recursive=True)}
    return found


def _is_of_browser(process: psutil.Process, before: set[psutil.Process]) -> bool:
    """Return whether a process was started by a browser that existed before."""
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("chrom") and process.parent() in before
    return False


def _directories() -> set[str]:
    host = waiting_host()
    of_host = {os.path.normpath(path) for path in (host.directory, host.transport.large_directory)} if host else set()
    found = set()
    for folder in (tempfile.gettempdir(), os.path.join(os.environ["XDG_RUNTIME_DIR"], "ddp_notebook")):
        with contextlib.suppress(FileNotFoundError):
            found |= {os.path.join(folder, name) for name in os.listdir(folder) if name.startswith("ddp_notebook-")}
    return found - of_host


def _sockets() -> int:
    return sockets_of(os.getpid()) - (waiting_host() is not None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files if their marks exclude all of their tests, so that workers do not import them."""
    expression = config.getoption("markexpr")
    is_named = any(collection_path.name in argument for argument in config.args)
    if not collection_path.name.startswith("test_") or is_named or " or " in expression:
        return None
    excluded = _NO_UNIT if expression == "unit" else re.findall(r"\bnot (\w+)", expression)
    found = _FILE_MARKS.search(collection_path.read_text())
    marks = re.findall(r"pytest\.mark\.(\w+)", found[1]) if found else []
    return True if set(marks) & set(excluded) else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Workers take files in this order. A slow file at the end would leave the other workers without work.
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in _LONG_FILES)
    for item in items:
        if _STARTS_RANKS & set(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")
        if not any(item.get_closest_marker(name) for name in _NO_UNIT):
            item.add_marker("unit")


class NoProcesses:
    """Blocks process starts during unit tests, and makes the test fail even if it catches the error."""

    def __init__(self) -> None:
        self.test = ""  # running unit test; "": none
        self.started: list[str] = []

    def refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event."""
        if self.test and event in _PROCESS_EVENTS:
            self.started.append(f"{event}{arguments[:2]!r}")
            raise RuntimeError(f"{self.test} starts a process, {self.started[-1]}: {self.advice}")

    @property
    def advice(self) -> str:
        return "a test that does has pytest.mark.processes, or takes a fixture that starts ranks"


_no_processes = NoProcesses()
sys.addaudithook(_no_processes.refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Prevent a unit test and its fixtures from starting a process."""
    _no_processes.test = item.nodeid if item.get_closest_marker("unit") else ""
    _no_processes.started = []
    try:
        return (yield)
    finally:
        _no_processes.test = ""


@pytest.fixture(autouse=True)
def starts_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that has tried to start a process."""
    yield
    if _no_processes.test:
        tried = _no_processes.started
        assert not tried, f"the test starts a process, {tried[0]}: {_no_processes.advice}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a file to one worker, because they share a session. Tests that share nothing are separate."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in _SHARE_NOTHING else file

    return ByFile(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End this process even if a thread of a failed test is still running, and print its stack.

    A worker of pytest-xdist waits here for the others, and its parent ends it.
    """
    if hasattr(config, "workerinput"):
        return
    faulthandler.dump_traceback_later(_LEFTOVER_DEADLINE_S * 6, exit=True, file=2)


@pytest.fixture(scope="session", autouse=True)
def own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create directories of sessions where no other process creates any.

    Also starts the event loop of jupyter_client, which lives as long as the process, so that its sockets are not
    attributed to a test.
    """
    run_sync(asyncio.sleep)(0)
    previous, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("tmp"))
    os.environ["TMPDIR"] = tempfile.tempdir
    # the path of a Unix socket must be short
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="run-", dir="/tmp")
    yield
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"])
    tempfile.tempdir = previous


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check after every test that it has left no process, socket or directory. Those of module fixtures existed before.

    The session of a module may have replaced ranks, up to the previous number, and a controller, which its first use
    starts. The browser of a module starts processes at any time.
    """
    is_unit = bool(_no_processes.test)  # a unit test starts no process, so none need to be searched
    before, directories, sockets = set() if is_unit else _processes(), _directories(), _sockets()
    had_session = _current() is not None
    yield
    from ddp_notebook.launch.processes import descendants

    def left() -> set[psutil.Process]:
        if is_unit:
            return set()
        session = _current() if had_session else None
        new = {process for process in _processes() - before if not _is_of_browser(process, before)}
        if session is None:
            return new
        controllers = [p.pid for pid in session.ranks.pids("controller") for p in descendants(pid)]
        known = {*session.ranks.pids(), *controllers}
        return {process for process in new if process.pid not in known}

    wait_until(lambda: not left(), _LEFTOVER_DEADLINE_S, lambda: f"processes are left: {left()}")
    wait_until(lambda: not (_directories() - directories), what="directories are left")
    wait_until(lambda: _sockets() <= sockets, what="sockets are left")


@pytest.fixture(scope="session")
def waiting_host_server() -> Iterator[Callable[[], None]]:
    """Prepare an idle host server for the next session, as `%load_ext` does.

    It is idle again when the session ends. So torch is imported once for many sessions, instead of 2 s for each.
    """
    from ddp_notebook.launch import warm

    yield warm.prepare
    warm.drop()


@pytest.fixture
def make_session(waiting_host_server) -> Iterator[Any]:
    """Start a session, and stop it after the test.

    Its ranks are forked from the idle host server. With `cold=True` a new host server starts in the current
    environment, which takes 3 s longer.
    """
    from ddp_notebook import api
    from ddp_notebook import session as sessions
    from ddp_notebook.launch import warm

    def make(world_size: int = 2, *, cold: bool = False, **options):
        warm.drop() if cold else waiting_host_server()
        return api.start(world_size, **options)

    yield make
    if (running := sessions.current()) is not None:
        running.stop()


@pytest.fixture
def make_session_alone(make_session):
    """Like `make_session`, in a module with a running session, which is stopped. Put such tests last."""
    if (running := _current()) is not None:
        running.stop()
    return make_session


def _current():
    from ddp_notebook import session as sessions

    return sessions.current()


@pytest.fixture(scope="module")
def session(waiting_host_server) -> Iterator[Any]:
    """Two CPU ranks for all tests of a module."""
    from ddp_notebook import api

    waiting_host_server()
    with api.start(2) as running:
        yield running


def ipykernel6() -> str:
    """Return the folder of ipykernel 6.31 without its dependencies, which precedes the installed one on the path."""
    return os.environ.get("DDP_NOTEBOOK_TEST_IPYKERNEL6", "")


@pytest.fixture(scope="module", params=["newest", pytest.param("6.31", marks=pytest.mark.long)])
def kernel(request) -> Iterator[Any]:
    """A real notebook kernel with the extension loaded, on the newest ipykernel.

    Long tests also use the oldest supported ipykernel. `test_cell_table` checks its cell output in `make test` too.
    """
    from tests.kernels import NotebookKernel

    if request.param == "6.31" and not ipykernel6():
        pytest.skip("DDP_NOTEBOOK_TEST_IPYKERNEL6 names no folder with ipykernel 6.31; `make test` sets it")
    with closing(NotebookKernel(pythonpath=ipykernel6() if request.param == "6.31" else "")) as running:
        running.run("%load_ext ddp_notebook")
        running.let_lines_wait()
        version = running.run("import ipykernel; print(ipykernel.__version__)").stdout
        assert version.startswith("6.31") == (request.param == "6.31")
        yield running


@pytest.fixture
def make_kernel() -> Iterator[Any]:
    """Start notebook kernels, and shut them down after the test."""
    from tests.kernels import NotebookKernel

    with ExitStack() as stack:

        def make(**options):
            return stack.enter_context(closing(NotebookKernel(**options)))

        yield make
