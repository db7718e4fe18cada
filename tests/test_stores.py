"""A rank's connection to the store asks no name service, which may be slow."""

from __future__ import annotations

import ctypes
import socket
import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from ddp_notebook.rank.group import stores
from ddp_notebook.wire.events import Form

NAMELESS = ("203.0.113.7", 80)  # of a network for documentation, so in no /etc/hosts


class Resolver(ctypes.Structure):
    """As far as the first name server. Source: https://man7.org/linux/man-pages/man3/resolver.3.html"""

    _fields_ = [
        *stores._ResolverState._fields_,
        ("nscount", ctypes.c_int),
        ("family", ctypes.c_uint16),
        ("port", ctypes.c_uint16),
        ("address", ctypes.c_uint8 * 4),
    ]


@pytest.fixture
def name_server():
    """A name server that hears questions and answers none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.2)
        yield server


def in_thread(function):
    """The resolver's state belongs to a thread, so whatever changes it has one of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(30)
    return found[0]


def asking(server):
    """This thread's resolver, which asks `server` only, once, and waits a second for an answer."""
    libc = ctypes.CDLL(None)
    libc.__res_init()
    libc.__res_state.restype = ctypes.POINTER(Resolver)
    state = libc.__res_state().contents
    state.retrans, state.retry, state.nscount = 1, 1, 1
    state.family, state.port = socket.AF_INET, socket.htons(server.getsockname()[1])
    state.address[:] = (127, 0, 0, 1)
    return state


def is_asked(server):
    try:
        return bool(server.recv(512))
    except TimeoutError:
        return False


def look_up():
    try:
        socket.getnameinfo(NAMELESS, socket.NI_NAMEREQD)
    except socket.gaierror:
        return False
    return True


def test_who_connects_asks_for_no_name_and_afterwards_as_before(name_server):
    def asked():
        state = asking(name_server)
        with stores._without_names():
            assert not look_up()
        within, attempts = is_asked(name_server), state.retry
        look_up()
        return within, attempts, is_asked(name_server)

    assert in_thread(asked) == (False, 1, True)


def test_connecting_to_the_store_asks_for_no_name(name_server):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    place = Form(
        epoch=1,
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        group_rank=0,
        group_world_size=1,
        backend="gloo",
        device="cpu",
        store_host="127.0.0.1",
        store_port=port,
        store_prefix="test",
        interface="lo",
        threads=1,
        form_timeout_s=5,
    )

    def asked():
        asking(name_server)
        client = stores.connect(place, timedelta(seconds=10))
        client.set("rank", "0")
        return is_asked(name_server)

    assert not in_thread(asked)
    assert server.get("rank") == b"0"
