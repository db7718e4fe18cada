"""One session for each number of ranks, for all tests of the lessons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", params=[2, 3, pytest.param(4, marks=pytest.mark.long)])
def ranks(request) -> Iterator[int]:
    """As many ranks as this number are running."""
    from ddp_notebook import session as sessions

    with sessions.start(request.param):
        yield request.param
