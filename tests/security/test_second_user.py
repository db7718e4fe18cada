"""A second user of the machine attacks a session: none of their code is executed, no rank dies, the session works."""

from __future__ import annotations

import os
import selectors
import threading

import pytest

from ddp_notebook.launch.host.preflight_checks import Reach
from ddp_notebook.messages.hosts import (
    ConnectReply,
    ConnectRequest,
    ConnectTarget,
    ListenPlace,
    ListenRequest,
    StopListeningRequest,
)
from tests.conftest import wait_until
from tests.security.attack import attack, attacking

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become a second user")
_PLAIN = {"the session's store, ranks on one machine", "`MASTER_ADDR`", "the notebook's wire", "gloo"}
_PIDS = "import os; print(os.getpid())"
_INIT_RPC = (
    "import operator; from torch.distributed import rpc\n"
    "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size)"
)
_CALL = "print(rpc.rpc_sync(f'worker{1 - rank}', operator.add, (1, 2)))"


@pytest.fixture(scope="module", autouse=True)
def store_for_programs(session):
    """The store starts at the first connection, and then runs until the session ends."""
    session.run("import os; dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)")


@pytest.fixture(autouse=True)
def unharmed(session, tmp_path):
    """After each attack the ranks are the same, work, and have executed no code of the second user."""
    before = [session.run(_PIDS)[rank].stdout for rank in range(2)]
    yield
    code = "x = torch.ones(2); dist.all_reduce(x); dist.barrier(dist.new_group()); print(x.tolist())"
    assert session.run(code)[1].stdout == "[2.0, 2.0]\n"
    assert [session.run(_PIDS)[rank].stdout for rank in range(2)] == before
    assert not (tmp_path / "marker").exists()


@pytest.mark.long
def test_another_user_reads_no_session_key_and_changes_nothing(session, stranger, tmp_path):
    found = attack(stranger, tmp_path / "marker")
    assert found.rows() == _PLAIN
    found.check_nothing_was_read()
    assert [said["keys"] for said in found.ports.values() if "keys" in said] == [[]]


def test_the_users_own_programs_find_a_store_at_master_port(session):
    code = (
        "import os; store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "store.set(f'rank{rank}', 'here'); print(store.get(f'rank{1 - rank}'))"
    )
    assert session.run(code)[0].stdout == "b'here'\n"


def test_a_group_that_forms_anew_is_not_led_elsewhere(session, stranger, tmp_path):
    """Bytes that another user wrote earlier have no effect on the next group."""
    attack(stranger, tmp_path / "marker")
    session.run("dist.destroy_process_group(); dist.init_process_group()")


@pytest.mark.long
def test_another_user_reads_only_a_random_word_of_a_host_probe(stranger, tmp_path):
    with selectors.DefaultSelector() as selector:
        reach, ended = Reach(selector), threading.Event()
        [port] = _ask(reach, ListenRequest(places=[ListenPlace("127.0.0.1", 0, 1, "word")])).ports

        def serve() -> None:
            while not ended.is_set():
                for key, _ in selector.select(0.05):
                    key.data()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            found = attack(stranger, tmp_path / "marker")
            read = set(found.ports[f"127.0.0.1:{port}"]["read"])
            assert b"word".hex() in read and read <= {b"word".hex(), "closed"}
            assert _tried(reach, port) == ConnectReply(tried=[""]), "another host goes on being heard"
        finally:
            ended.set()
            thread.join()
            _ask(reach, StopListeningRequest())


def _ask(reach, request):
    return reach.handlers[type(request)](request)


def _tried(reach, port):
    trying = _ask(reach, ConnectRequest(targets=[ConnectTarget("127.0.0.1", port, "word")], within_s=5.0))
    answers = iter(trying.advance, ...)
    return next(answer for answer in answers if answer is not None)


@pytest.mark.long
def test_bytes_of_another_user_at_the_ports_of_rpc_kill_no_rank(session, stranger, tmp_path):
    session.run(_INIT_RPC)
    assert session.run(_CALL)[0].stdout == "3\n"
    found = attack(stranger, tmp_path / "marker")
    assert found.rows() == {*_PLAIN, "TensorPipe"}
    found.check_nothing_was_read()
    assert session.run(_CALL)[0].stdout == "3\n", "they were connected before"
    session.run("rpc.shutdown()")


@pytest.mark.long
def test_pickles_at_workers_that_meet_are_not_executed(session, stranger, tmp_path):
    """The attack continues while ranks call init_rpc."""
    with attacking(stranger, tmp_path / "marker") as rounds:
        wait_until(lambda: len(rounds) > 1, 60)
        for attacked in range(2, 5):
            session.run(_INIT_RPC)
            session.run("rpc.shutdown()")
            wait_until(lambda attacked=attacked: len(rounds) > attacked, 60)
    for found in rounds:
        found.rows()
        found.check_nothing_was_read()
