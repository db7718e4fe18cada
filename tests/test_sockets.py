"""The sockets of gloo and of the stores are found and cut, and no others are. Two ranks run in this process."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ddp_notebook.rank.group.connections import sockets


def make_groups() -> list[ProcessGroupGloo]:
    """Create a group of two ranks, each in a thread of this process."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(ProcessGroupGloo, store, rank, 2, timedelta(seconds=10)) for rank in range(2)]
        return [rank.result() for rank in ranks]


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@contextlib.contextmanager
def connection(port: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection that belongs to neither gloo nor a store. The first end has this port."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        near.bind(("127.0.0.2", port))
        near.connect(server.getsockname())
        far, _ = server.accept()
        with far:
            yield near, far


def lives(ends: tuple[socket.socket, socket.socket]) -> bool:
    ends[0].sendall(b".")
    return ends[1].recv(1) == b"."


def receive(group: ProcessGroupGloo) -> str:
    """Wait for a message of rank 1. Return the text of its error: the error object would keep the group alive."""
    try:
        group.recv([torch.ones(1)], 1, 0).wait()  # type: ignore[attr-defined]
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_groups_connections_are_cut_and_no_others():
    before = set(sockets.listeners())
    other, group = make_groups(), make_groups()
    new = sockets.gloo_listeners(before)
    of_other = sockets.gloo_listeners(before | set(list(new)[2:]))
    assert len(new) == 4 and len(of_other) == 2
    own = new.keys() - of_other.keys()
    _, port = new[min(own)]
    with connection() as ends, connection(port) as with_that_port, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(receive, group[0])
        assert sockets.cut_groups(own) >= 1  # gloo closes the other end when it notices the cut
        assert "gloo" in waits.result(10)
        assert lives(ends)
        assert lives((with_that_port[1], with_that_port[0]))
        receives = pool.submit(receive, other[0])
        other[1].send([torch.zeros(1)], 0, 0).wait()  # type: ignore[attr-defined]
        assert receives.result(10) == ""


def test_connections_of_peers_are_cut_if_the_kernel_lists_none(monkeypatch):
    monkeypatch.setattr(sockets, "_loops", list)
    before = set(sockets.listeners())
    group = make_groups()
    own = sockets.gloo_listeners(before)
    with connection() as ends, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(receive, group[0])
        assert sockets.cut_groups(own) == 1  # one end of the connection
        assert "gloo" in waits.result(10)
        assert lives(ends)


def test_listeners_of_other_loops_are_not_gloos():
    """The others are listeners of a zmq socket, a store or asyncio, which another thread creates while a group
    forms."""
    before = set(sockets.listeners())
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0):
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with socket.create_server(("127.0.0.1", 0)), select.epoll():
            assert len(sockets.listeners().keys() - before) == 3
            assert sockets.gloo_listeners(before) == {}
        del store
    finally:
        done.set()
        thread.join()


def test_a_store_is_cut_by_its_address_and_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port, fd = bound.getsockname()[1], bound.detach()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    client = TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    with socket.create_server(("127.0.0.3", port)) as server, socket.create_connection(server.getsockname()) as ours:
        far, _ = server.accept()
        with far, ThreadPoolExecutor(1) as pool:
            waits = pool.submit(client.wait, ["never"], timedelta(seconds=60))
            assert sockets.cut_stores({("10.0.0.1", port)}) == 0
            # two clients, or the other ends of their connections
            assert sockets.cut_stores(sockets.addresses("localhost", port)) >= 2
            assert isinstance(waits.exception(10), DistNetworkError)  # at any step of its request
            assert lives((ours, far))
    del store, client


def test_a_name_that_nobody_knows_is_nowhere():
    assert sockets.addresses("no-such-host.invalid", 1) == set()
