"""Each kind of process is stopped and killed, in plain and kept sessions, on this machine and over ssh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import psutil
import pytest

from tests.conftest import wait_until
from tests.faults.kinds import CONNECT, KINDS, OF_JUPYTER_AND_SSHD, kinds
from tests.faults.stopping import NAMED_S, Stopping
from tests.faults.test_kinds import PLAIN
from tests.faults.test_stopping import nothing_is_left  # noqa: F401  # of the module, as there
from tests.keep.conftest import runtime  # noqa: F401  # a fixture
from tests.ssh import sshd

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

_OVER_SSH = {"rank", "store", "host server", "watchdog", "parent", "ssh", "cleaner"}
SESSIONS = {
    "plain": PLAIN,
    "kept": {*PLAIN, "keeper"},
    "ssh": {*_OVER_SSH, "waiting host server", "watchdog of the waiting host server"},
    "kept ssh": {*_OVER_SSH, "keeper", "proxy", "carrier", "end of a carrier", "stream"},
}
_SILENCE_S = 1.5  # a host whose process cannot be seen from here is named later


@pytest.fixture
def notebook_of(tmp_path, runtime) -> Iterator[Callable[[str], Stopping]]:  # noqa: F811
    """Return a function that starts a session of a kind."""
    directory = tmp_path
    env = {"XDG_RUNTIME_DIR": str(runtime)}

    def start(session: str) -> Stopping:
        where = f" --hosts one:1,two:1 --python {sshd.python(directory)}" if "ssh" in session else " 2"
        keep = " --keep 1" if "kept" in session else ""
        preload = {} if "ssh" in session and not keep else {"DDP_NOTEBOOK_PRELOAD": "0"}
        notebook = Stopping(f"%ddp_start{where}{keep}", {**env, **preload})
        assert notebook.kernel.run(CONNECT).status == "ok"
        if "ssh" not in session:
            assert notebook.kernel.run("session.client").status == "ok"
        return notebook

    with sshd.running(directory) as command, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_SSH", command)
        yield start


def _found(notebook: Stopping, session: str) -> dict[str, list[psutil.Process]]:
    keeper = 0
    if "kept" in session:
        keeper = int(notebook.kernel.run("print(session._remote.pid)").stdout)
    return kinds(notebook, keeper)


@pytest.mark.parametrize("session", SESSIONS)
def test_each_kind_of_process_is_named(notebook_of, session):
    with closing(notebook_of(session)) as notebook:
        found = _found(notebook, session)
        assert set(found) - OF_JUPYTER_AND_SSHD - {"TCPStore"} == SESSIONS[session] - {"TCPStore"}
        for name in KINDS:
            if name in found:
                _stop(notebook, name, found[name][-1].pid)


def _stop(notebook: Stopping, name: str, pid: int) -> None:
    kind = KINDS[name]
    with notebook.stopped(pid):
        message = notebook.kernel.start(kind.line)
        notebook.expect(kind.stopped.format(pid=pid), NAMED_S + (_SILENCE_S if name == "stream" else 0.0))
    notebook.end(message)
    notebook.check_comes_back()


@pytest.mark.parametrize(
    ("session", "name"), [(one, name) for one, names in SESSIONS.items() for name in sorted(names)]
)
def test_each_killed_process_is_replaced_or_named(notebook_of, session, name):
    kind = KINDS[name]
    with closing(notebook_of(session)) as notebook:
        [*_, process] = _found(notebook, session)[name]
        process.kill()
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
        message = notebook.kernel.start(kind.after)
        notebook.expect(kind.killed.format(pid=process.pid), 10.0)
        notebook.end(message)
        if kind.remedy:
            assert notebook.kernel.run(kind.remedy, 60).status == "ok"
        if not kind.keeps:
            notebook.set_up()
        notebook.check_comes_back()
