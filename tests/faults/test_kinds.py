"""Every process of a plain session is of a known kind. `tests/long` stops and kills each kind."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.faults.kinds import CONNECT, KINDS, OF_JUPYTER_AND_SSHD, kinds
from tests.faults.stopping import Stopping

PLAIN = {"host server", "watchdog", "rank", "store", "TCPStore", "controller", "part of the controller"}


@pytest.mark.alone
def test_every_process_of_a_session_has_a_known_kind():
    with closing(Stopping()) as notebook:
        assert notebook.kernel.run(CONNECT).status == "ok"
        assert notebook.kernel.run("session.client").status == "ok"
        found = kinds(notebook)

    assert set(found) - OF_JUPYTER_AND_SSHD == PLAIN
    assert set(KINDS) >= PLAIN
    counts = {kind: len(those) for kind, those in found.items()}
    assert (counts["rank"], counts["host server"], counts["watchdog"], counts["store"]) == (2, 1, 1, 1), counts
