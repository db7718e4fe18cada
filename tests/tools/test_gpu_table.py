"""The result table of the tests on GPUs, created here from tests without a GPU."""

from __future__ import annotations

from tests.gpu.table import table

pytest_plugins = ["pytester"]

_TESTS = """
import pytest

def test_a_step_over_nccl(record_property):
    record_property("a step of", "3.1 ms")

def test_that_fails():
    assert 1 == 2, "a | b"

def test_that_needs_two():
    pytest.skip("one rank waits for nobody")
"""


def test_each_test_has_a_line_with_what_it_has_noted(pytester):
    pytester.makepyfile(_TESTS)
    run = pytester.inline_run("-p", "no:cacheprovider")
    lines = list(table("1 x GPU", [one for outcome in run.listoutcomes() for one in outcome]))
    assert lines[0] == "1 x GPU:"
    assert [line.split(" | ")[0:2] for line in lines[4:]] == [
        ["| a step over nccl", "passed"],
        ["| that needs two", "skipped"],
        ["| that fails", "failed"],
    ]
    assert lines[4].endswith("| a step of 3.1 ms |")
    assert lines[5].endswith("| one rank waits for nobody |")
    assert lines[6].endswith("| AssertionError: a / b |")
