"""Data of a connection that was not acknowledged."""

from __future__ import annotations

import socket

import pytest

from ddp_notebook.launch.transports.ssh import unacknowledged_bytes
from tests.conftest import wait_until


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_was_taken_and_what_was_not(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        with socket.create_connection(server.getsockname()[:2]) as client:
            served, _ = server.accept()
            with served:
                connection = " ".join(map(str, (*client.getsockname()[:2], *served.getsockname()[:2])))
                served.sendall(b"beat")
                wait_until(lambda: unacknowledged_bytes(connection) == 0)
                served.setblocking(False)
                with pytest.raises(
                    BlockingIOError
                ):  # the peer does not read, so data stays in the send buffer when the peer's buffer is full
                    while True:
                        served.send(bytes(1 << 16))
                wait_until(lambda: (unacknowledged_bytes(connection) or 0) > 0)
        wait_until(lambda: unacknowledged_bytes(connection) is None)


@pytest.mark.parametrize("connection", ["", "1.2.3.4 5", "a b c d", "127.0.0.1 1 127.0.0.1 2"])
def test_what_is_not_known(connection):
    assert unacknowledged_bytes(connection) is None
