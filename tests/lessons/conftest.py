"""Sessions for the tests of the lessons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def shown_answers() -> Iterator[None]:
    """Show results without a guess, and write no file of answers. Kernels that tests start inherit this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_NOTEBOOK_ANSWERS", "shown")
        yield


@pytest.fixture(scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))])
def ranks(request, waiting_host_server) -> Iterator[int]:
    """Start this number of ranks. (With three ranks there are groups of two.)"""
    from ddp_notebook import api

    waiting_host_server()
    with api.start(request.param):
        yield request.param


@pytest.fixture(scope="module")
def session(waiting_host_server) -> Iterator[Any]:
    """Start two ranks."""
    from ddp_notebook import api

    waiting_host_server()
    with api.start(2) as running:
        yield running
