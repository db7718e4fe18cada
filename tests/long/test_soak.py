"""Random faults of all kinds in one session: how many it survives, what they cost at worst, and what is left of them.

`DDP_NOTEBOOK_SOAK_FAULTS` sets how many there are, and `DDP_NOTEBOOK_SOAK_SEED` repeats a row.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_notebook.registry import entries
from tests.keep.conftest import notebook, runtime  # noqa: F401  # fixtures
from tests.long.soaking import Soak
from tests.long.test_faults import SEED

pytestmark = pytest.mark.long

FAULTS = int(os.environ.get("DDP_NOTEBOOK_SOAK_FAULTS", "1000"))
_MORE_FILES = 6  # of the lasting processes: a cell, or a connection, may be under way


def _keeper() -> int:
    [entry] = entries.entries()
    return entry.pid


@pytest.mark.timeout(120 + 5 * FAULTS)  # each takes about one second
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "ordinary"])
def test_the_session_goes_on(notebook, keeps):  # noqa: F811
    """A fifth of the faults strikes a session that is not kept, where ranks come and go too."""
    soak = Soak(notebook, _keeper if keeps else None, SEED)
    try:
        soak.strike(FAULTS if keeps else max(1, FAULTS // 5))
    finally:
        print(f"seed {SEED}, {'kept' if keeps else 'ordinary'} session: {soak.report()}")
    assert not soak.failed, f"{len(soak.failed)} of {soak.tried.total()} were not survived"
    first, last = soak.held[0], soak.held[-1]
    assert last["processes"] - last["ranks"] == first["processes"] - first["ranks"], soak.held
    assert last["open files"] <= first["open files"] + _MORE_FILES, soak.held
    folders = [Path(entry.folder) for entry in entries.entries()]
    assert soak.kernel.run("%ddp_stop").status == "ok"
    assert entries.entries() == [] and not any(folder.exists() for folder in folders)
