"""The table of messages: which texts of the source belong into it, and that each has a cause and a fix."""

import pytest

from tools import messages

_SOURCE = '''
"""A docstring of the module is no message at all."""
from wherever import warn

RESULT = "the ranks wait for each other"


def check(rank, seconds, parser):
    """A docstring of a function is no message either."""
    parser.add_argument("--rank", help="help texts are listed on another page")
    warn(f"rank {rank} has not answered for {seconds:g} s" + ("; press stop to end the whole cell" if rank else ""))
    warn(f"{'one text inside of another text' if rank else ''} is also found, in any case")
    _log.debug("a log that is off by default")
    warn("four words are few")
    code = "import sys; print the path of this"
    raise UsageError(f"no such rank: {rank}", hint="start more ranks, or use another one")


def fail():
    raise AssertionError("only a fault of this package raises this one")
'''


def test_texts_of_the_source_that_users_see():
    assert list(messages.of_source(_SOURCE)) == ["no such rank: {rank}"]
    assert sorted(messages.notes_of_source(_SOURCE)) == [
        "; press stop to end the whole cell",
        "one text inside of another text",
        "rank {rank} has not answered for {seconds} s{...}",
        "start more ranks, or use another one",
        "the ranks wait for each other",
        "{...} is also found, in any case",
    ]


def test_each_file_with_messages_has_a_subject():
    assert messages.subject_of("run/cells/watch.py") == "stop button and hangs"
    assert messages.subject_of("run/cells/cell.py") == "cells"
    with pytest.raises(ValueError, match="belongs to no subject"):
        messages.subject_of("running/elsewhere.py")


def test_the_tables_have_warnings_advice_and_log_messages():
    notes = messages.notes()
    assert any(text.startswith("no optimizer of torch.optim") for text in notes["recording"])
    assert any(text.startswith("gradient_as_bucket_view=True") for text in notes["report"])
    assert any("lost" in text for text in notes["start, hosts and connections"])


def test_each_message_has_a_cause_and_a_fix():
    assert messages.problems() == [], "run: python tools/messages.py --add, and fill in the columns"
