"""The facts of several hosts: the misfits that are found, and how they are displayed."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import ddp_notebook
from ddp_notebook.errors import StartError
from ddp_notebook.launch import warm
from ddp_notebook.launch.preflight import compare
from ddp_notebook.launch.preflight.pairs import HostAddress, Unreached, places, routes
from ddp_notebook.launch.preflight.query import Answer
from ddp_notebook.launch.preflight.table import HostTable
from ddp_notebook.magics import DDPMagics
from ddp_notebook.version import __version__

_GPU = {"index": 0, "uuid": "GPU-1", "name": "H100", "memory_mib": 80_000}
_FACTS = {
    "address": "10.0.0.1",
    "interfaces": {"10.0.0.1": "eth0", "02:42:ac:11:00:02": "eth0", "10.1.0.1": "eth1"},
    "env": {},
    "package": __version__,
    "python": "3.12.4",
    "torch": "2.13.0",
    "gpus": [_GPU] * 8,
    "cores": 96,
    "machine_cores": 96,
    "memory_mib": 1 << 20,
}
_SITE = {"user": "ada", "cuda": "12.8", "free_mib": 900 << 10, "has_directory": True, "has_marker": True}


def _answer(host: str, *, clock_ns: int = 0, **changed) -> Answer:
    facts = {name: changed.pop(name, value) for name, value in _FACTS.items()}
    return Answer(
        host=host,
        machine=host,
        facts=facts,
        site={**_SITE, **changed},
        has_marked=True,
        clock_ns=clock_ns,
        clock_error_ns=100_000,
    )


def _table(*answers: Answer) -> HostTable:
    reached = [answer for answer in answers if not answer.trouble]
    found = [*compare.versions(reached), *compare.addresses(reached), *compare.remarks(reached, "/home/ada/project")]
    return HostTable(answers=answers, findings=tuple(found))


def test_hosts_that_are_alike():
    table = _table(_answer("a"), _answer("b", address="10.0.0.2", python="3.12.1", free_mib=800 << 10))
    assert table.fits and not table.findings
    titles, a, b = (re.split(r"  +", line) for line in repr(table).splitlines())
    alike = ["2.13.0", "12.8", __version__, "8 x H100", "96"]
    assert titles == ["host", *(column.title for column in compare.COLUMNS)]
    assert a == ["a", "10.0.0.1 (eth0)", "ada", "3.12.4", *alike, "966 GB of 1.1 TB free", "the same", "± 100 µs"]
    assert b == ["b", "10.0.0.2", "ada", "3.12.1", *alike, "859 GB of 1.1 TB free", "the same", "± 100 µs"]
    starts = {tuple(match.start() for match in re.finditer(r"(?<=  )\S", line)) for line in repr(table).splitlines()}
    assert len(starts) == 1, "the columns stand below each other"


@pytest.mark.parametrize(
    ("changed", "marked", "words", "fits"),
    [
        ({"torch": "2.12.0"}, "2.12.0*", "torch differs between hosts: 2.13.0 on a and c, 2.12.0 on b", False),
        ({"python": "3.11.2"}, "3.11.2*", "Python differs between hosts: 3.12 on a and c, 3.11 on b", False),
        (
            {"package": "0.0.9"},
            "0.0.9*",
            f"ddp_notebook differs between hosts: {__version__} on the notebook, a and c, 0.0.9 on b; install one",
            False,
        ),
        ({"address": "127.0.0.1"}, "127.0.0.1*", "b is the notebook's own machine, reached at 127.0.0.1", False),
        ({"cores": 1}, "1 of 96*", "b: ranks can use only 1 of 96 cores, .* Open MPI binds a task to one core", True),
        ({"gpus": [_GPU] * 4}, "4 x H100*", "hosts differ: GPUs of b; all ranks wait for the slowest", True),
        ({"cuda": ""}, "-*", "hosts differ: CUDA of b", True),
        ({"memory_mib": 1 << 18}, "966 GB of 275 GB free*", "hosts differ: memory of b", True),
        ({"user": "bob"}, "bob*", "the user differs between hosts: ada on a, bob on b, ada on c", True),
        (
            {"has_marker": False},
            "another one*",
            "/home/ada/project of the notebook is not shared with b: .*sends them.$",
            True,
        ),
        (
            {"has_marker": False, "has_directory": False},
            "not there*",
            "not shared with b: .*; ranks of b begin in the home directory",
            True,
        ),
        ({"clock_ns": -3_200_000_000}, "-3.2 s*", "the clock of b differs from the notebook's, .*chrony", True),
    ],
)
def test_what_differs_is_marked_and_the_fix_said(changed, marked, words, fits):
    table = _table(_answer("a"), _answer("b", **changed), _answer("c"))
    row_of_b, *below = repr(table).splitlines()[2:]
    assert marked in row_of_b and row_of_b.count("*") == 1
    assert repr(table).splitlines()[1].count("*") == 0 and below[0].count("*") == 0
    assert re.search(words, "\n".join(below), re.MULTILINE)
    assert table.fits is fits and len(table.findings) == 1


def test_a_host_that_is_not_reached_is_a_row():
    why = "no host server on far-away: ssh: refused; no ssh\nserver answers"
    lost = Answer(host="far-away", machine="x", trouble=why)
    table = _table(_answer("a"), lost, _answer("b"))
    _, a, far_away, b = repr(table).splitlines()
    assert a.startswith("a         10.0.0.1") and b.startswith("b         10.0.0.1")
    assert far_away == "far-away  not reached*: ssh: refused; no ssh server answers"
    assert table.unreached == ["far-away"] and not table.fits
    assert repr(HostTable(answers=(lost,))).splitlines()[1] == far_away


def test_what_makes_no_group_is_said_first():
    table = _table(_answer("a"), _answer("b", cores=1, torch="2.12.0"))
    assert [line[:10] for line in repr(table).splitlines()[3:]] == ["* torch di", "* b: ranks"]


def _failed(source: str, target: str, why: str = "no answer in 2 s", **more) -> Unreached:
    return Unreached(source=source, target=target, place=HostAddress(f"10.0.0.{target}", "eth0"), why=why, **more)


def test_connections_that_fail_are_named_with_what_helps():
    assert compare.connections([]) == []
    [one] = compare.connections([_failed("1", "2"), _failed("3", "2"), _failed("2", "1", "Connection refused")])
    assert one.is_fatal and one.marks == {("2", "reached at"), ("1", "reached at")}
    assert one.sentence.startswith(
        "1 and 3 cannot connect to 2 at 10.0.0.2 (eth0): no answer in 2 s, "
        "2 cannot connect to 1 at 10.0.0.1 (eth0): Connection refused; a firewall may be between them: open all ports"
    )
    [one] = compare.connections([_failed("1", "2", instead=(HostAddress("10.9.0.2", "ib0"),))])
    assert one.sentence.endswith(
        "; 2 is reached at 10.9.0.2 (ib0): set the addresses of that network in ~/.ssh/config (HostName)"
    )
    [one] = compare.connections([dataclasses.replace(_failed("1", "2"), place=HostAddress("127.0.0.1", "lo", True))])
    assert "unset GLOO_SOCKET_IFNAME" in one.sentence
    [one] = compare.connections([_failed("0", str(n)) for n in range(1, 8)])
    assert one.sentence.count("cannot connect") == 4 and ", and 3 more; " in one.sentence


def test_of_many_machines_a_ring_is_tried_and_the_stores():
    nine = routes([f"m{n}" for n in range(9)])
    assert len(nine) == len(set(nine)) < 9 * 8
    assert all((other, one) in nine for one, other in nine)
    for n in range(9):
        assert (f"m{n}", f"m{(n + 1) % 9}") in nine
        assert n == 0 or (f"m{n}", "m0") in nine
    assert routes(["one"]) == []


def test_gloo_listens_at_the_first_address_of_its_interface():
    facts = {**_FACTS, "address": "10.0.0.7", "interfaces": {"10.0.0.1": "eth0", "10.0.0.7": "eth0"}}
    assert list(map(str, places(facts))) == ["10.0.0.7 (eth0)", "10.0.0.1 (eth0)"]
    assert list(map(str, places(_FACTS))) == ["10.0.0.1 (eth0)"]
    asked = {**_FACTS, "env": {"GLOO_SOCKET_IFNAME": "eth1"}}
    assert list(map(str, places(asked))) == ["10.0.0.1 (eth0)", "10.1.0.1 (eth1)"] and places(asked)[1].is_asked
    with pytest.raises(
        StartError, match=r"GLOO_SOCKET_IFNAME must be one of the host's interfaces \(eth0, eth1.*\), got ib0"
    ):
        places({**_FACTS, "env": {"GLOO_SOCKET_IFNAME": "ib0"}})


@pytest.mark.long
def test_one_machine_is_checked_and_nothing_starts(waiting_host_server, capsys):
    waiting_host_server()
    magics: Any = DDPMagics(None)
    magics.ddp_start("3 --check")
    stages, titles, row, *_, plan = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"checking:  \S+ \d+\.\d s", stages) and titles.startswith("host          reached at")
    assert (
        row.startswith("this machine  127.0.0.1 (lo)") and "the same" in row and plan == "3 ranks would start, by gloo"
    )
    assert ddp_notebook.current() is None
    too_many = ddp_notebook.check(4096)
    assert not too_many.fits and re.search(
        r"^\* 4096 ranks need some .* start at most \d+", repr(too_many), re.MULTILINE
    )


@pytest.mark.long
def test_what_was_mended_on_a_host_is_seen(tmp_path, monkeypatch):
    """In a notebook, host servers wait for the next start. A host server that has imported a wrong version must not be
    kept."""
    command = tmp_path / "ssh"  # runs the remote command on this machine
    command.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    command.chmod(0o755)
    monkeypatch.setenv("DDP_NOTEBOOK_SSH", str(command))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(ddp_notebook.__file__).parents[1]}")
    monkeypatch.setattr(warm, "_is_preparing", True)
    older = tmp_path / "sitecustomize.py"
    older.write_text("import ddp_notebook.version; ddp_notebook.version.__version__ = '0.0.9'")
    try:
        assert not ddp_notebook.check(2, hosts=ddp_notebook.Ssh("one", python=sys.executable)).fits
        with pytest.raises(StartError, match=r"0\.0\.9 on one; install one version"):
            ddp_notebook.start(2, hosts=ddp_notebook.Ssh("one", python=sys.executable))
        older.unlink()
        assert ddp_notebook.check(2, hosts=ddp_notebook.Ssh("one", python=sys.executable)).fits
        assert warm._far, "this one waits"
    finally:
        warm.drop()
