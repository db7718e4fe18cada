"""The table of cells, on every kind of session, three times in a row."""

from __future__ import annotations

from itertools import product

import pytest

from tests.cell_table import TABLE
from tests.conftest import ipykernel6
from tests.test_cell_table import run_table

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("world_size", "start_method", "version"), list(product([2, 4], ["fork", "spawn"], ["newest", "6.31"])), ids=str
)
def test_every_cell_three_times_in_a_row(tally, world_size, start_method, version):
    if version == "6.31" and not ipykernel6():
        pytest.skip("DDP_NOTEBOOK_TEST_IPYKERNEL6 names no folder with ipykernel 6.31; `make test-long` sets it")
    what = f"table of {len(TABLE)} cells: {world_size} ranks, {start_method}, ipykernel {version}"
    run_table(world_size, start_method, ipykernel6() if version == "6.31" else "", tally(3, what))
