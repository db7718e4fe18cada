"""Many ranks that consist only of the wire, as `tests.benchmarks.many` has hundreds of: their messages arrive."""

from __future__ import annotations

import pytest

from tests.benchmarks import many
from tests.benchmarks.fake_ranks import EVENTS
from tests.conftest import wait_until

RANKS = 24


@pytest.mark.slow
def test_all_answer_and_what_all_record_comes_in():
    with many.session(RANKS) as (notebook, ranks, _):
        answers = notebook.ask_all()
        assert sorted(answers) == list(range(RANKS))
        assert len(answers[1].encode()[0]) < 1000, "each tells that it waits for all of them, in few numbers"
        assert many.card_ms(notebook, answers) > 0
        ranks.record(seconds=0.4)
        calls = notebook.observer.recording.store.rings["call"]
        wait_until(lambda: calls.end == RANKS * 2 * EVENTS, 10.0, "the rows of all")
        wait_until(lambda: notebook.observer.recording.clock_error_ns(RANKS - 1) is not None)
        assert notebook.observer.recording.dropped == {}
