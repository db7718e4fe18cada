"""A second user of the machine attacks a session: nothing of theirs is executed, no rank dies, the session works on."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import marked_processes, net_connections

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can make a second user")
_NAME = "ddp-nb-stranger"


@pytest.fixture(scope="module")
def stranger():
    """The id of a second user of this machine."""
    added = subprocess.run(["useradd", "--system", "--no-create-home", _NAME], capture_output=True, text=True)
    if added.returncode not in (0, 9):  # 9: the name is there already
        pytest.skip(f"useradd: {added.stderr.strip()}")
    yield pwd.getpwnam(_NAME).pw_uid
    subprocess.run(["userdel", _NAME], capture_output=True)


@pytest.fixture(scope="module", autouse=True)
def store_for_programs(session):
    """It starts at the first connection, and then stays as long as the session."""
    session.run("import os; dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)")


def listening() -> set[int]:
    """Ports on which the processes of this test run listen."""
    found = set()
    for process in [*marked_processes(), psutil.Process()]:
        with contextlib.suppress(psutil.Error):
            found |= {one.laddr.port for one in net_connections(process) if one.status == psutil.CONN_LISTEN}
    return found


def attack(session, stranger: int, marker: Path) -> list[dict[str, object]]:
    """Have the second user attack all ports and sockets. Returns what they have read."""
    master = int(session.run("import os; print(os.environ['MASTER_PORT'])", ranks=0)[0].stdout)
    ports = [*sorted(listening() - {master}), master]
    program = Path(__file__).with_name("stranger.py")
    ran = subprocess.run(
        [sys.executable, str(program), str(stranger), str(marker), *map(str, ports)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def check_unharmed(session, marker: Path) -> None:
    pids = "import os; print(os.getpid())"
    before = [session.run(pids)[rank].stdout for rank in range(2)]
    code = "x = torch.ones(2); dist.all_reduce(x); dist.barrier(dist.new_group()); print(x.tolist())"
    assert session.run(code)[1].stdout == "[2.0, 2.0]\n"
    assert [session.run(pids)[rank].stdout for rank in range(2)] == before
    assert not marker.exists()


@pytest.mark.long
def test_another_user_reads_no_key_of_a_session_and_changes_nothing(session, stranger, tmp_path):
    before = [session.run("import os; print(os.getpid())")[rank].stdout for rank in range(2)]
    read = attack(session, stranger, marker := tmp_path / "marker")
    assert [one["keys"] for one in read if "master" in one] == [[]]
    sockets = {one["socket"]: one["read"] for one in read if "socket" in one}
    assert any(str(name).startswith("@ddp_notebook-store-") for name in sockets)
    assert set(sockets.values()) <= {"closed", "refused"}
    assert [session.run("import os; print(os.getpid())")[rank].stdout for rank in range(2)] == before
    check_unharmed(session, marker)


def test_the_users_own_programs_find_a_store_at_master_port(session):
    code = (
        "import os; store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "store.set(f'rank{rank}', 'here'); print(store.get(f'rank{1 - rank}'))"
    )
    assert session.run(code)[0].stdout == "b'here'\n"


@pytest.mark.long
def test_bytes_of_another_user_at_the_ports_of_rpc_kill_no_rank(session, stranger, tmp_path):
    session.run(
        "import operator; from torch.distributed import rpc\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)"
    )
    call = "print(rpc.rpc_sync(f'worker{1 - rank}', operator.add, (1, 2)))"
    assert session.run(call)[0].stdout == "3\n"
    attack(session, stranger, marker := tmp_path / "marker")
    assert session.run(call)[0].stdout == "3\n"
    check_unharmed(session, marker)
    session.run("rpc.shutdown()")


def test_a_group_that_forms_anew_is_not_led_elsewhere(session, stranger, tmp_path):
    """What another user wrote before does not matter to the next group."""
    marker = tmp_path / "marker"
    attack(session, stranger, marker)
    session.run("dist.destroy_process_group(); dist.init_process_group()")
    check_unharmed(session, marker)
