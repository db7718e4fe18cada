"""A thousand random operations and faults in one session, while another Unix user attacks it.

The test prints how many the session survived and the worst time of each kind. `DDP_NOTEBOOK_SOAK_FAULTS` sets their
number and `DDP_NOTEBOOK_SOAK_SEED` repeats a sequence.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from ddp_notebook.registry import entries
from tests.conftest import below
from tests.keep.conftest import notebook, runtime  # noqa: F401  # fixtures
from tests.long.soaking import Soak
from tests.long.test_faults import SEED

pytestmark = pytest.mark.long

FAULTS = int(os.environ.get("DDP_NOTEBOOK_SOAK_FAULTS", "1000"))
_MORE_FILES = 6  # in addition to the first number of open files: a cell or a connection may be in progress


def _keeper() -> int:
    [entry] = entries.entries()
    return entry.pid


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """Set a temporary folder for this test, with a short path because it contains Unix sockets."""
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder)


def _targets(folders: tuple[Path, ...], attacker: int) -> dict[str, list[object]]:
    """Return the targets: ports, sockets, files and ids of the processes below this one and of the keeper."""
    pids = {psutil.Process(entry.pid) for entry in entries.entries()} | {psutil.Process()}
    processes = pids | {child for process in pids for child in process.children(recursive=True)}
    ports, sockets = set(), set()
    for process in processes:
        try:
            for connection in process.net_connections("all"):
                if connection.status == psutil.CONN_LISTEN:
                    ports.add(connection.laddr.port)
                elif isinstance(connection.laddr, str) and connection.laddr:
                    sockets.add(connection.laddr)
        except psutil.Error:
            continue  # the process has ended
    files = [str(path) for folder in folders for path in below(folder) if not path.is_dir()]
    return {
        "ports": sorted(ports),
        "sockets": sorted(sockets),
        "files": files[:100],
        "pids": [process.pid for process in processes if process.pid not in (os.getpid(), attacker)],
    }


@contextmanager
def _attacker(folders: tuple[Path, ...], marker: Path) -> Iterator[None]:
    """Let another user attack the session until the block ends, and check that no attack had an effect."""
    if os.getuid() != 0:
        yield  # only root can start a process of another user
        return
    command = [sys.executable, str(Path(__file__).with_name("attacker.py")), "65534", str(marker)]
    env = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}  # a store that rejects it logs a page each time
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    stdin = process.stdin
    assert stdin is not None
    ended = threading.Event()

    def tell_targets() -> None:
        while not ended.wait(1.0):
            stdin.write(json.dumps(_targets(folders, process.pid)) + "\n")
            stdin.flush()

    teller = threading.Thread(target=tell_targets)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
        tried, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and tried, "the attacker failed: its traceback is in the captured output"
    counts = json.loads(tried)
    print(f"the other user: {counts}")
    assert counts["port connected"] > 0, "the attacker found the session"
    assert not marker.exists(), "something executed a pickle of the other user"
    assert counts.keys().isdisjoint({"file written", "process killed", "socket answered", "store keys replaced"}), (
        counts
    )


@pytest.mark.timeout(120 + 5 * FAULTS)  # each takes about one second
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "ordinary"])
def test_the_session_goes_on(notebook, keeps, runtime, temporary):  # noqa: F811  # fixtures
    """A fifth of the faults strikes a session that is not kept."""
    marker = temporary / "executed"
    temporary.chmod(0o777)  # allows the other user to create the marker
    with _attacker((runtime, temporary), marker):
        soak = Soak(notebook, _keeper if keeps else None, SEED)
        try:
            soak.strike(FAULTS if keeps else max(1, FAULTS // 5))
        finally:
            print(f"seed {SEED}, {'kept' if keeps else 'ordinary'} session: {soak.report()}")
    assert not soak.failed, f"{len(soak.failed)} of {soak.tried.total()} were not survived"
    # The first count is taken while processes of the session still start, such as the host server for the next one.
    last = soak.held[-1]
    first = next(one for one in soak.held[1:] if one["ranks"] == last["ranks"])  # each rank needs some files
    assert last["processes"] == first["processes"], soak.held
    assert last["open files"] <= first["open files"] + _MORE_FILES, soak.held
    folders = [Path(entry.folder) for entry in entries.entries()]
    assert soak.kernel.run("%ddp_stop").status == "ok"
    assert entries.entries() == [] and not any(folder.exists() for folder in folders)
