"""The tools of ipyparallel on the same engines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import ipyparallel
import psutil
import pytest
import zmq

from ddp_notebook import ClientError
from tests.conftest import wait_until


@pytest.fixture(autouse=True)
def close_the_client(session):
    """Close the client, whose sockets belong to one test."""
    yield
    session._parts.client.close()


def test_the_first_use_during_a_job_names_the_job(session):
    """The engine of a rank registers and answers between two cells."""
    job = session.submit("import time\nif rank: time.sleep(60)", quiet=True)
    wait_until(lambda: job.run is not None and job.run.pending == [1])
    began_s = time.monotonic()
    sentence = r"between two cells. rank 1 runs job 1 since \d+ s: %ddp_wait 1 waits for it, %ddp_cancel 1 ends it"
    with pytest.raises(ClientError, match=sentence):
        session.client.close()
    assert time.monotonic() - began_s < 5
    job.cancel()
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()


def test_a_plain_client_of_the_same_processes(session):
    client = session.client
    assert client is session.client
    assert client.ids == [0, 1]
    assert client[:].apply_sync(os.getpid) == session.ranks.pids()
    client[:].push({"pushed": 5}, block=True)
    assert session.run("pushed + rank")[1].result == "6"


def test_px_text_goes_to_its_client_and_ours_to_us(session):
    ours = session.run("print('ours')")
    theirs = session.client[:].execute("print('theirs', rank)", block=True)
    theirs.wait_for_output(10)
    assert sorted(theirs.stdout) == ["theirs 0\n", "theirs 1\n"]
    assert ours[0].stdout == "ours\n"
    assert session.run("print('ours again')")[1].stdout == "ours again\n"


def test_displays_are_our_cells_again_after_one_of_px(session):
    """The kernel receives for each cell the message that it answers, and more after a message of the client."""
    parents = """
shell = get_ipython()
headers = shell.kernel.get_parent()["header"], shell.displayhook.parent_header, shell.display_pub.parent_header
ids = {header["msg_id"] for header in (*headers, shell.parent_header["header"])}
"""
    view, seen = session.client[:], []
    for _ in range(2):
        for _ in range(2):
            session.run(parents)
            assert all(len(ids) == 1 for ids in session["ids"].values())
            seen.append(session["ids"][0].pop())
        view.execute("ids = {get_ipython().display_pub.parent_header['msg_id']}", block=True)
        assert not any("ddp-cell-" in "".join(ids) for ids in session["ids"].values())
    assert len(set(seen)) == 4 and all(one.startswith("ddp-cell-") for one in seen)


def test_a_client_hears_what_engines_publish_before_it_is_used(session, monkeypatch):
    """Otherwise the output of its first call could be lost, including the call's end, for which ipyparallel waits."""

    class Slow(ipyparallel.Client):
        """A client with a slow subscription, as on a busy machine."""

        def _setup_streams(self) -> None:
            self._iopub_socket.setsockopt(zmq.UNSUBSCRIBE, b"")
            super()._setup_streams()
            self._io_loop.call_later(1.0, self._iopub_socket.setsockopt, zmq.SUBSCRIBE, b"")

    monkeypatch.setattr(ipyparallel, "Client", Slow)
    theirs = session.client[:].execute("print('theirs', rank)", block=False)
    assert theirs.wait_for_output(10)
    assert sorted(theirs.stdout) == ["theirs 0\n", "theirs 1\n"]


def test_px_waits_while_our_cell_awaits(session):
    """It must not run inside our cell."""
    view = session.client[:]
    session.run("import asyncio; order = []")
    started = session.run(
        "order.append('begin')\nloop_time = asyncio.get_running_loop().time()\n"
        "await asyncio.sleep(0)\norder.append('end')"
    )
    assert started.ok
    theirs = view.execute("order.append('px')", block=False)
    session.run("order.append('a'); await asyncio.sleep(0.3); order.append('b')")
    theirs.get(10)
    for order in session.pull("order").values():
        assert "ab" in "".join(order) and sorted(order) == sorted(["begin", "end", "px", "a", "b"])


def test_builtins_replaced_by_a_client_call_are_restored(session):
    for name in ("len", "isinstance", "dict"):
        session.client[:].execute(f"import builtins; builtins.{name} = None", block=False)
        assert session.run("dist.barrier(); len([1])", timeout_s=10)[1].result == "1"


def test_its_interrupt_reaches_a_px_cell(session, tmp_path):
    if ipyparallel.version_info < (9,):
        pytest.skip("ipyparallel 8 hears it when the cell is over")
    client = session.client
    code = f"import time\nopen(f'{tmp_path}/{{rank}}', 'w').close()\ntime.sleep(60)"
    running = client[:].execute(code, block=False)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 10, "both engines are in the cell")
    client.send_signal(signal.SIGINT, block=True)
    running.wait(10)
    assert running.ready() and not running.successful()
    assert session.run("dist.barrier()").ok


@pytest.mark.long
def test_without_a_controller_all_else_goes_on(make_session_alone):
    """The next use of `client` starts it again, with the same engines."""
    session = make_session_alone(2)
    client = session.client
    assert client.ids == [0, 1]
    waiting = client[:].apply_async(time.sleep, 1)
    controller = psutil.Process(session.ranks.pids("controller")[0])
    for process in controller.children(recursive=True)[:4]:  # without them it would accept calls and never answer
        with contextlib.suppress(psutil.NoSuchProcess):  # the controller may have noticed the first one already
            process.kill()
    wait_until(lambda: not session.ranks.pids("controller"))
    with pytest.raises(
        ipyparallel.CompositeError, match="controller of ipyparallel has ended, and the reply to this call is lost"
    ):
        waiting.get(10)
    wait_until(lambda: client._closed)
    with pytest.raises(RuntimeError, match="closed"):
        client[:].apply_sync(int)
    assert session.run("x = torch.ones(1); dist.all_reduce(x); x")[0].result == "tensor([2.])"
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
    assert session.run("x")[0].result == "tensor([2.])"


def test_a_client_call_to_a_dead_rank_fails_until_it_is_healed(make_session_alone, capsys):
    session = make_session_alone(2)
    client = session.client
    waiting, balanced = client[:].apply_async(time.sleep, 1), client.load_balanced_view([1])
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    wait_until(lambda: "rank 1 died (killed by SIGKILL) during a call of session.client" in capsys.readouterr().err, 3)
    with pytest.raises(ipyparallel.CompositeError, match=r"rank 1 died .*%ddp_heal replaces it") as raised:
        waiting.get(10)
    assert "ddp_notebook/" not in str(raised.value.render_traceback())
    wait_until(lambda: client.ids == [0], 3, "the controller knows of it")
    for call in (lambda: client[1], lambda: client[[0, 1]].apply_async(int), lambda: balanced.apply_async(int)):
        with pytest.raises(IndexError, match=r"^rank 1 died \(killed by SIGKILL\); %ddp_heal replaces it"):
            call()
    with pytest.raises(IndexError, match="No such engine: 2"):
        client[2]

    session.ranks.heal()
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()


@pytest.mark.long
def test_a_load_balanced_view_names_the_rank_that_died(make_session_alone):
    session = make_session_alone(2)
    waiting = session.client.load_balanced_view([1]).apply_async(time.sleep, 60)
    wait_until(lambda: "call of session.client" in session.status().rows[1].state)
    os.kill(session.ranks.pids()[1], signal.SIGKILL)
    with pytest.raises(
        ipyparallel.RemoteError, match=r"rank 1 died \(killed by SIGKILL\), .*%ddp_heal replaces it"
    ) as raised:
        waiting.get(10)  # the controller waits 5 s for the reply
    assert "died while running" not in str(raised.value.render_traceback())


@pytest.mark.long
def test_a_call_in_another_thread_ends_with_the_session(make_session):
    session = make_session(2)
    view = session.client[:]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(view.apply_sync, time.sleep, 60)
        wait_until(lambda: len(session.client.outstanding) == 2)
        session.stop()
        with pytest.raises(ipyparallel.CompositeError, match=r"session.client was closed"):
            waiting.result(5)


@pytest.mark.parametrize("kind", ["rank", "host server"])
def test_a_call_ends_when_all_ranks_end(make_session, kind, capsys):
    session = make_session(2)
    view = session.client[:]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(view.execute, "import time; time.sleep(60)", block=True)
        wait_until(lambda: len(session.client.outstanding) == 2)
        for pid in session.ranks.pids(kind):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ipyparallel.CompositeError, match=r"ranks 0-1 died|ranks 0,1 died|the ranks have ended"):
            waiting.result(5)
    assert not view.client.outstanding


def _binds(listener: socket.socket, port: int) -> bool:
    with contextlib.suppress(OSError):
        listener.bind(("127.0.0.1", port))
        listener.listen()
        return True
    return False


@pytest.mark.long
def test_a_killed_controller_restarts_when_its_ports_are_free(make_session_alone):
    """Schedulers of a killed controller keep its sockets until their last thread has ended."""
    session = make_session_alone(2)
    url = session.client._config["registration"]
    os.kill(session.ranks.pids("controller")[0], signal.SIGKILL)
    wait_until(lambda: not session.ranks.pids("controller"))
    with socket.socket() as other, ThreadPoolExecutor() as pool:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: _binds(other, int(url.rpartition(":")[2])))
        client = pool.submit(lambda: session.client)
        wait_until(lambda: session.ranks.pids("controller"))
        [first] = session.ranks.pids("controller")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: session.ranks.pids("controller") not in ([], [first]), 10, "another controller")
        other.close()
        assert client.result(20)[:].apply_sync(os.getpid) == session.ranks.pids()


@pytest.mark.long
def test_the_first_use_starts_the_controller_with_replaced_ranks(make_session_alone):
    session = make_session_alone(2)
    assert session.ranks.pids("controller") == []
    for replaced, controllers in ((1, 0), (0, 1), (1, 1)):  # replaced ranks, and number of started controllers
        pid = session.ranks.pids()[replaced]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: pid not in session.ranks.pids())
        session.ranks.heal()
        assert len(session.ranks.pids("controller")) == controllers
        assert session.client.ids == [0, 1]
        assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
        hear_late(session.client, "unregistration_notification")  # for the next controller


def hear_late(client, notification: str) -> None:
    """Delay notifications of a kind in a client, as on a busy machine."""
    hear = client._notification_handlers[notification]

    def late(message):
        time.sleep(0.5)
        hear(message)

    client._notification_handlers[notification] = late
