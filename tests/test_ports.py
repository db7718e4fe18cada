"""The ports and addresses on which processes listen with `--ports`."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack

import pytest

from ddp_notebook.errors import ClientError, StartError, UsageError
from ddp_notebook.launch import controller
from ddp_notebook.launch.start_line import parse
from ddp_notebook.launch.transports.ports import ANY, Listening, first_free
from ddp_notebook.wire.bulk import BulkFetcher
from ddp_notebook.wire.endpoint import Endpoint
from ddp_notebook.wire.keys import Keyring


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--hosts a,b --ports 40000",
            "--ports must be the first and last port of a range, e.g. --ports 40000-40100, got 40000",
        ),
        (
            "--hosts a,b --ports a-b",
            "--ports must be the first and last port of a range, e.g. --ports 40000-40100, got a-b",
        ),
        ("--hosts a,b --ports 500-600", "--ports must be within 1024 to 65535, e.g. --ports 40000-40100, got 500-600"),
        ("--hosts a,b --ports 65000-70000", "--ports must be within 1024 to 65535"),
        (
            "--hosts a,b --ports 40000-40002",
            "--ports must have at least 5 ports, e.g. --ports 40000-40100, got 40000-40002",
        ),
        ("--hosts a,b --ports 40000-40003", "--ports must have at least 5 ports"),
        ("--hosts a,b --ports 40100-40000", "--ports must have at least 5 ports"),
        ("2 --ports 40000-40100", "--ports works only with other machines; ranks on this one listen on loopback only"),
    ],
)
def test_ports_that_cannot_be(line, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(line)


def test_any_port_where_none_was_asked_for():
    assert parse("--hosts a,b").port_range == ANY
    assert parse("--hosts a,b --ports 40000-40100").port_range == range(40000, 40101)


def _address() -> str:
    """Return an address of this machine that is not loopback, or skip the test if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # connecting a UDP socket sends nothing
        except OSError:
            pytest.skip("this machine has no route to a network")
        return str(asked.getsockname()[0])


def _free(count: int) -> range:
    """Return `count` free ports in a row, outside the range from which the system assigns ports."""
    for first in range(20000, 30000, count):
        taken = []
        try:
            taken = [socket.create_server(("", port)) for port in range(first, first + count)]
            return range(first, first + count)
        except OSError:
            continue
        finally:
            for one in taken:
                one.close()
    raise AssertionError("no ports are free")


def test_the_first_free_ports_are_used_or_an_error_is_raised():
    at = Listening(_address(), _free(3))
    keyring = Keyring()
    with socket.create_server((at.host, at.ports[0])):
        endpoint = Endpoint.listen(keyring, lambda *_: None, bind=at.bind)
        endpoint.start()
        bulk = BulkFetcher(endpoint.context, keyring, at.bind)
        try:
            urls = [endpoint.url, bulk.url]
            assert urls == [f"tcp://{at.host}:{port}" for port in at.ports[1:]]
            with pytest.raises(
                StartError, match=rf"^ports {at.ports[0]}-{at.ports[2]} of {at.host} are all taken; pass"
            ):
                Endpoint.listen(keyring, lambda *_: None, bind=at.bind)
        finally:
            bulk.close()
            endpoint.close()


def test_on_loopback_any_port_will_do():
    with first_free(lambda port: socket.create_server(("127.0.0.1", port)), "127.0.0.1", range(1, 2)) as listener:
        assert listener.getsockname()[1] > 1024


def test_ports_for_engines_of_the_controller_are_in_the_range(tmp_path):
    at = Listening(_address(), _free(20))
    spec = controller.make_spec(str(tmp_path), at)
    connection, urls = controller.for_engines(spec)
    ports = {int(url.rpartition(":")[2]) for url in urls}
    assert connection["interface"] == f"tcp://{at.host}" and len(ports) == 9 and ports <= set(at.ports)
    assert ports == set(spec.ports["engine_ports"])
    every_port = [port for pool in spec.ports.values() for port in pool]
    assert len(every_port) == len(set(every_port)), "no port is in two pools"
    with ExitStack() as taken:
        for port in (at.ports[-1], at.ports[-10]):  # one port of each possible row of nine
            taken.enter_context(socket.create_server((at.host, port)))
        with pytest.raises(ClientError, match=f"needs 9 free ports in a row, .* in {at.ports[0]}-{at.ports[-1]};"):
            controller.make_spec(str(tmp_path), at)
