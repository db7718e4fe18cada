"""The session's store: the results that torch and programs get from a client, and the clients that are refused."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from ddp_notebook.launch import store_process
from ddp_notebook.launch.store_process import Server
from ddp_notebook.messages.processes import StoreSpec
from ddp_notebook.rank.group import stores
from ddp_notebook.rank.group.stores import Connection, SessionStore
from ddp_notebook.wire import store as protocol
from ddp_notebook.wire.store import StoreAddress
from tests.conftest import is_within, wait_until

KEY = "ab" * protocol.KEY_BYTES


def serve(listener, key=b""):
    server, ends = Server(listener, key), threading.Event()

    def turn():
        while not ends.is_set():
            server.turn(0.02)
        server.close()

    thread = threading.Thread(target=turn)
    thread.start()

    def end():
        ends.set()
        thread.join(10)
        listener.close()

    return server, end


@pytest.fixture(params=["unix", "tcp"])
def place(request, tmp_path):
    """Return the address of a store, once for one machine and once for several hosts."""
    if request.param == "unix":
        listener, at = protocol.listen_here(str(tmp_path))
        _, end = serve(listener)
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        at = StoreAddress(f"127.0.0.1:{listener.getsockname()[1]}", KEY)
        _, end = serve(listener, at.secret)
    yield at
    stores._connections.close()
    end()


@pytest.fixture
def client(place):
    return SessionStore(place, timedelta(seconds=10))


def outcomes(store):
    """Return the results of all methods of a store, as programs see them."""
    store.set("text", "abc")
    store.set("bytes", b"\x00\xff")
    store.append("text", "def")
    store.multi_set(["one", "two"], ["1", "2"])
    store.queue_push("queue", "first")
    store.queue_push("queue", "second")
    found = [
        store.get("text"),
        store.multi_get(["bytes", "two"]),
        [store.add("count", 5), store.add("count", -7), store.get("count")],
        [store.check(["one", "two"]), store.check(["one", "three"])],
        [store.compare_set("new", "old", "x"), store.compare_set("new", "", "y"), store.compare_set("new", "y", "z")],
        [store.compare_set("new", "wrong", "w"), store.get("new")],
        [store.queue_len("queue"), store.queue_pop("queue"), store.queue_pop("queue", False), store.queue_len("queue")],
        [store.delete_key("one"), store.delete_key("one"), store.check(["one"])],
        sorted(store.list_keys()),
        store.has_extended_api(),
    ]
    store.wait(["two"], timedelta(seconds=1))
    store.set_timeout(timedelta(milliseconds=100))
    for wait in (lambda: store.get("never"), lambda: store.wait(["never", "ever"]), lambda: store.queue_pop("queue")):
        with pytest.raises(dist.DistStoreError) as raised:
            wait()
        found.append(str(raised.value))
    with pytest.raises(dist.QueueEmptyError) as raised:
        store.queue_pop("queue", False)
    return [*found, str(raised.value)]


@pytest.mark.long
@pytest.mark.parametrize("prefixes", [(), ("a",), ("a", "b")])
def test_a_client_does_what_torchs_store_does(client, prefixes):
    stores.install()
    torchs: Store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for prefix in prefixes:
        client, torchs = PrefixStore(prefix, client), PrefixStore(prefix, torchs)
    assert outcomes(client) == outcomes(torchs)
    del torchs
    gc.collect()  # the errors refer to their frames, and the frames refer to torch's store


def test_ranks_meet_at_it(place):
    groups = {}

    def meet(rank):
        store = PrefixStore("group", SessionStore(place, timedelta(seconds=10)))
        groups[rank] = ProcessGroupGloo(store, rank, 3, timeout=timedelta(seconds=20))

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(groups) == [0, 1, 2]


def test_a_wait_holds_up_no_other_request_and_is_ended_by_a_cut(client):
    failures = []

    def wait():
        with pytest.raises(dist.DistNetworkError) as raised:
            client.get("never")
        failures.append(str(raised.value))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: len(stores._connections._used) == 1)
    client.set("meanwhile", "1")
    assert client.get("meanwhile") == b"1"
    began_s = time.monotonic()
    wait_until(lambda: stores.cut() == 0)
    thread.join(5)
    assert is_within(time.monotonic() - began_s, 2)
    assert "Failed to recv, got 0 bytes" in failures[0]
    assert client.get("meanwhile") == b"1"  # uses a new connection


@pytest.mark.processes
def test_a_forked_child_has_connections_of_its_own(client):
    client.set("from", "parent")
    before = stores._connections._idle[0][1].socket
    pid = os.fork()
    if pid == 0:
        client.set("from", "child")
        os._exit(0 if stores._connections._idle[0][1].socket is not before else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.get("from") == b"child"


def test_a_value_of_another_kind_is_no_number(client):
    client.set("text", "abc")
    with pytest.raises(dist.DistStoreError, match="add: the value of key text is not a number"):
        client.add("text", 1)
    assert client.get("text") == b"abc"


# ---- who is refused


@pytest.fixture
def network():
    """Yield the address of a store that listens on a network, and the list of its clients."""
    listener = socket.create_server(("127.0.0.1", 0))
    server, end = serve(listener, bytes.fromhex(KEY))
    yield StoreAddress(f"127.0.0.1:{listener.getsockname()[1]}", KEY), server
    stores._connections.close()
    end()


def read_to_end(stranger):
    received = b""
    stranger.settimeout(10)
    while more := stranger.recv(4096):
        received += more
    return received


@pytest.mark.parametrize(
    "sent",
    [
        protocol.Sealing(b"", b"", is_server=False).seal(protocol.pack([b"keys"])),
        b"\xff" * 64,
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        bytes([64, 0, 0, 0]) + bytes(64),
    ],
    ids=["a request", "a long message", "nothing", "HTTP", "a wrong proof"],
)
def test_a_stranger_on_the_network_is_refused(network, sent):
    place, _ = network
    SessionStore(place).set("secret", "value")
    with socket.create_connection(place.address) as stranger:
        stranger.sendall(sent)
        assert len(read_to_end(stranger)) == 4 + protocol.KEY_BYTES  # the server's nonce
    assert SessionStore(place).get("secret") == b"value"


def test_who_has_another_key_is_refused_and_reads_nothing(network):
    place, _ = network
    with pytest.raises(dist.DistNetworkError, match=r"did not prove that it is the session's store"):
        SessionStore(StoreAddress(place.at, "00" * protocol.KEY_BYTES)).set("key", "forged")
    assert not SessionStore(place).check(["key"])


def test_a_server_that_does_not_know_the_key_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            other, _ = listener.accept()
            with other:
                seal = protocol.Sealing(b"", b"", is_server=True).seal
                other.sendall(seal(bytes(protocol.KEY_BYTES)))
                other.recv(4096)
                other.sendall(seal(bytes(protocol.KEY_BYTES)))
                other.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(dist.DistNetworkError, match="does not know the key of this session"):
            SessionStore(StoreAddress(f"127.0.0.1:{listener.getsockname()[1]}", KEY)).get("address")
        thread.join(10)


@pytest.mark.parametrize("direction", ["request", "reply"])
def test_a_value_that_is_altered_on_its_way_is_never_used(network, direction):
    place, _ = network
    SessionStore(place).set("address", "10.0.0.1")
    connection = Connection(place, 10)
    sendall, receive = connection.socket, connection._receive

    class Altering:
        """A socket between client and server that replaces the address in the request."""

        def __getattr__(self, name):
            return getattr(sendall, name)

        def sendall(self, data):
            sendall.sendall(data.replace(b"10.0.0.2", b"10.6.6.6"))

    if direction == "request":
        connection.socket = Altering()  # type: ignore[assignment]
        with pytest.raises(ConnectionError, match="closed the connection"):
            connection.ask([b"set", b"address", b"10.0.0.2"], 10)
    else:
        connection._receive = lambda most: receive(most).replace(b"10.0.0.1", b"10.6.6.6")  # type: ignore[method-assign]
        with pytest.raises(protocol.StoreRefusedError, match="was altered on its way"):
            connection.ask([b"get", b"address"], 10)
    connection.close()
    assert SessionStore(place).get("address") == b"10.0.0.1"


def test_a_message_cannot_be_repeated(network):
    place, _ = network
    connection = Connection(place, 10)
    message = connection._sealing.seal(protocol.pack([b"add", b"count", b"1"]))
    connection.socket.sendall(message + message)
    connection._receive(1000)
    with pytest.raises(ConnectionError):
        connection._receive(1000)
    connection.close()
    assert SessionStore(place).get("count") == b"1"


def test_connections_without_a_proof_are_bounded(network):
    place, server = network
    strangers = [socket.create_connection(place.address) for _ in range(300)]
    wait_until(lambda: len(server._unproved) >= 250)
    SessionStore(place).set("key", "value")
    assert SessionStore(place).get("key") == b"value"
    assert len(server._unproved) <= 256
    for stranger in strangers:
        stranger.close()
    wait_until(lambda: not server._unproved)


def test_a_store_on_a_network_needs_a_key():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ValueError, match="needs a key"):
        Server(listener, b"")


def test_other_stores_keep_their_queues_and_keys():
    stores.install()
    store = PrefixStore("a", HashStore())
    store.queue_push("q", "x")
    assert store.queue_pop("q") == b"x"
    assert store.list_keys() == []


def test_the_tcpstore_survives_a_stop_and_restarts_after_its_end(make_session, capsys):
    """Otherwise programs of the next session would wait in C++, where no interrupt ends them."""
    session = make_session(2)
    use = (
        "import os\n"
        "store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "store.set(f'key {rank}', 'value'); print(store.get(f'key {rank}'))"
    )
    [parent] = session.ranks.pids("store")

    def use_it(after: str) -> int:
        capsys.readouterr()
        said = ""
        assert session.run(use, timeout_s=20)[1].stdout == "b'value'\n"

        def is_said() -> bool:
            nonlocal said
            session.run("pass")
            said += "".join(capsys.readouterr())
            return after in said

        try:
            wait_until(is_said, 3, what=after)
        except AssertionError:
            raise AssertionError(f"not {after!r} in {said!r}") from None
        return next(child.pid for child in psutil.Process(parent).children())

    pid = use_it("")
    until = time.monotonic() + 1.1
    wait_until(lambda: time.monotonic() > until, what="it is older than a failed start")
    os.kill(pid, signal.SIGSTOP)
    assert use_it(f"(process {pid}) was stopped and has been resumed; nothing is lost") == pid
    os.kill(pid, signal.SIGKILL)
    assert use_it(f"(process {pid}) has ended (killed by SIGKILL), and its keys are lost. ") != pid


@pytest.mark.processes
def test_a_tcpstore_that_cannot_start_is_reported_once(monkeypatch, capfd):
    def fail(_):
        if pid := os.fork():
            return pid
        os._exit(3)

    monkeypatch.setattr(store_process, "_serve_users", fail)
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    before = signal.getsignal(signal.SIGCHLD)
    try:
        served = store_process.ForUsers(
            selector, StoreSpec(host="127.0.0.1", ports=(0, 1), fd=listener.detach(), port=port)
        )
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.settimeout(0.01)
                ended = False
                until = time.monotonic() + 10
                while not ended and time.monotonic() < until:
                    for key, events in selector.select(0.01):
                        key.data(events)
                    with contextlib.suppress(TimeoutError):
                        ended = client.recv(1) == b""
                assert ended
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, before)
        selector.close()
        served._listener.close()
        os.close(served._wake_r)
    assert capfd.readouterr().err.count("ended at its start (exited with status 3)") == 1


def test_an_error_shows_a_key_without_the_session_and_its_group(place):
    client = SessionStore(place, timedelta(milliseconds=20), "0491ab")
    with pytest.raises(
        dist.DistStoreError, match=r"^wait timeout after 20ms, keys: /default_pg/0/mine, /rpc/x, /yours$"
    ):
        client.multi_get(["0491ab/7/default_pg/0/mine", "0491ab/rpc/x", "yours"])
