"""The lessons on two and three ranks: their statements about four ranks also hold there."""

from __future__ import annotations

import pytest

from tests.lessons.test_notebooks import LESSONS, check_shown, execute

pytestmark = pytest.mark.long


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_on_other_numbers_of_ranks(path, world_size):
    check_shown(execute(path, world_size))
