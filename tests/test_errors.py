"""Errors as shown to the user."""

from __future__ import annotations

import random

from ddp_notebook import errors
from ddp_notebook.errors import (
    DDPNotebookError,
    NoSessionError,
    RankDiedError,
    RankError,
    StartTimeoutError,
    UsageError,
)
from ddp_notebook.records.words import format_ranks, group_by_value, name_ranks
from ddp_notebook.run.cells.result import CellResult, RankResult


def test_every_error_is_listed_and_has_the_same_base():
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}

    assert errors.__all__ == sorted(kinds)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), DDPNotebookError)
        assert name in errors.__doc__, "the module shows the whole tree"


def test_errors_are_caught_by_the_builtin_ones_that_they_are():
    assert issubclass(UsageError, ValueError)
    assert issubclass(StartTimeoutError, TimeoutError)
    assert issubclass(RankDiedError, RankError)


def test_a_notebook_shows_the_message_alone():
    assert NoSessionError()._render_traceback_() == [
        "NoSessionError: no ranks are running; start them with %ddp_start 4"
    ]


def test_ranks_are_written_as_a_short_set():
    assert format_ranks([]) == ""
    assert format_ranks([3]) == "3"
    assert format_ranks([0, 1]) == "0-1"
    assert format_ranks([0, 1, 2, 5]) == "0-2,5"
    assert format_ranks([5, 0, 2, 1]) == "0-2,5"
    assert format_ranks([1, 3, 5]) == "1,3,5"
    assert format_ranks([0, 2, 3, 7, 8, 9, 63]) == "0,2-3,7-9,63"
    assert format_ranks(range(64)) == "0-63"


def test_one_rank_is_a_rank_and_more_are_ranks():
    assert name_ranks([2]) == "rank 2"
    assert name_ranks([3, 0, 1]) == "ranks 0-1,3"


def test_equal_texts_are_grouped_in_order_of_their_first_rank():
    assert list(group_by_value({3: "b", 1: "a", 0: "b", 2: "c"}).items()) == [("b", [0, 3]), ("a", [1]), ("c", [2])]


def test_the_same_failure_on_many_ranks_is_said_once():
    error = RankError({}, {0: "ValueError: bad", 1: "ValueError: bad", 3: "KeyError: 'x'", 2: "ValueError: bad"})

    assert str(error) == "ValueError: bad (ranks 0-2); KeyError: 'x' (rank 3)"


def test_what_the_other_ranks_did_is_said_too():
    states = ["error", "ok", "ok", "interrupted", "running", "ok"]
    result = CellResult({rank: RankResult(status=status) for rank, status in enumerate(states)})

    error = RankError({}, {0: "ValueError: bad"}, result)

    assert str(error) == (
        "ValueError: bad (rank 0); succeeded: ranks 1-2,5; interrupted: rank 3; not ended yet: rank 4"
    )
    assert error.result is result


def test_equal_tracebacks_are_shown_once_with_their_ranks():
    same = ["Traceback", "  cell line 1\n    1 / 0", "ZeroDivisionError: division by zero"]
    summaries = {rank: "ZeroDivisionError: division by zero" for rank in range(3)} | {3: "KeyError: 'x'"}
    chance = random.Random(0)
    order = chance.sample(range(3), 3)

    error = RankError({**{rank: list(same) for rank in order}, 3: ["KeyError: 'x'"]}, summaries)

    assert error._render_traceback_() == [
        "--- ranks 0-2 ---",
        "Traceback",
        "  cell line 1",
        "    1 / 0",
        "ZeroDivisionError: division by zero",
        "",
        "--- rank 3 ---",
        "KeyError: 'x'",
        "",
        "RankError: ZeroDivisionError: division by zero (ranks 0-2); KeyError: 'x' (rank 3)",
    ]


def test_a_death_is_shown_by_its_name():
    assert RankDiedError({}, {2: "killed by SIGKILL"})._render_traceback_() == [
        "RankDiedError: killed by SIGKILL (rank 2)"
    ]


def test_of_many_different_errors_the_first_are_shown():
    tracebacks = {rank: [f"traceback {chr(ord('A') + rank)}"] for rank in range(64)}
    told = RankError(tracebacks, {rank: f"E: {rank}" for rank in range(64)})

    shown = "\n".join(told._render_traceback_())
    assert shown.count("traceback ") == 4
    assert "--- ranks 4-63: other tracebacks, in the error's tracebacks[rank] ---" in shown
    first = "; ".join(f"E: {rank} (rank {rank})" for rank in range(4))
    assert shown.endswith(f"RankError: {first}; other errors (ranks 4-63)")
    assert told.tracebacks[63] == tracebacks[63]


def test_a_traceback_in_which_only_numbers_differ_is_shown_once():
    """For example if a message contains the rank, a process or an address. The last line contains the variants of each
    rank."""
    tracebacks = {rank: ["frame 1", f"E: worker {1000 + rank} at 0x7f{rank}a died"] for rank in range(3)}
    told = RankError({**tracebacks, 3: ["frame 2", "F: no"]}, {0: "E: 1000", 1: "E: 1001", 2: "E: 1002", 3: "F: no"})
    shown = told._render_traceback_()
    assert shown[:4] == [
        "--- ranks 0-2: traceback of rank 0; the others differ only in numbers ---",
        "frame 1",
        "E: worker 1000 at 0x7f0a died",
        "",
    ]
    assert shown[4:6] == ["--- rank 3 ---", "frame 2"] and "E: 1002 (rank 2)" in shown[-1]


def test_a_long_message_is_not_repeated_for_the_sake_of_a_number():
    told = RankError({}, {rank: f"E: worker {rank} {'is gone and ' * 10}" for rank in (0, 1, 3)})
    assert str(told).endswith("is gone and (rank 0; with other numbers on ranks 1,3)") and str(told).count("E: ") == 1


def test_a_summary_says_what_a_message_says_first():
    """The message of `mp.spawn` starts with empty lines, and ends with the error of the child."""
    spawned = (
        "ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\n"
        "Traceback (most recent call last):\n  File ...\nValueError: bad batch\n"
    )
    for summary, line in (
        (spawned, "ProcessRaisedException: ValueError: bad batch"),
        (
            "ValueError: Caught ValueError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n  File ...\nValueError: bad item\n",
            "ValueError: Caught ValueError in DataLoader worker process 0. ValueError: bad item",
        ),
        (
            "OSError: worker failed\nTraceback (most recent call last):\n  File ...\nValueError: x\n\nSee the log",
            "OSError: worker failed ValueError: x",
        ),
        (
            "RuntimeError: KeyError: 'On worker1 (rank 1):\\nKeyError(\\'k\\')\\nTraceback (most recent call last):\\n"
            "  File ...\\nKeyError: \\'k\\'\\n'\n\nAt:\n  rpc/internal.py(236): _handle_exception\n",
            "RuntimeError: KeyError: 'On worker1 (rank 1): KeyError: 'k'",
        ),
        ("ValueError: one\nTraceback (most recent call last):\n  File ...\nBoom: 3", "ValueError: one ..."),
        ("AssertionError: \nlengths differ", "AssertionError: lengths differ"),
        ("AssertionError: \nlengths differ\n1 and 2", "AssertionError: lengths differ ..."),
        ("ValueError: one\ntwo", "ValueError: one ..."),
        ("KeyError: 3", "KeyError: 3"),
        ("", ""),
    ):
        assert str(RankError({}, {0: summary})) == f"{line} (rank 0)"
