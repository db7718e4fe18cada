"""Facts that are read from a traceback: they keep nothing alive, and change nothing of the user."""

from __future__ import annotations

import gc
import weakref

import pytest

from ddp_notebook.rank.torch_errors import catalogue
from ddp_notebook.rank.torch_errors.raised import variables


class _Thing:
    pass


def _frame_of(function):
    try:
        function()
    except ValueError as error:
        assert error.__traceback__ is not None and error.__traceback__.tb_next is not None
        return error.__traceback__.tb_next.tb_frame
    raise AssertionError


def test_a_cleared_frame_keeps_no_variable():
    def fail():
        thing = _Thing()
        raise ValueError(thing)

    frame = _frame_of(fail)
    reference = weakref.ref(variables(frame)["thing"])
    frame.clear()
    gc.collect()
    assert reference() is None


def test_the_users_dictionary_of_locals_stays():
    kept = []

    def fail():
        number = 3
        kept.append(locals())
        raise ValueError(number)

    frame = _frame_of(fail)
    assert variables(frame)["number"] == 3
    assert kept[0]["number"] == 3


@pytest.mark.parametrize("entry", list(catalogue.entries()), ids=lambda entry: entry.name)
def test_cause_and_fix_are_phrases(entry):
    assert entry.cause and entry.fix and not entry.cause.endswith(".") and not entry.fix.endswith(".")
    assert len(f"{entry.cause}: {entry.fix}") < 320
