"""Try every pair of an operation and a kind of tensor on the ranks of a session.

    python -m tests.inputs.on_ranks [--only TEXT] [--write]

Prints the pairs. With `--write`, they are recorded in `tests/inputs/on_ranks.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankDiedError, RankError
from tests.inputs.cases import ERROR, MEMORY, RIGHT, WORLD, WRONG
from tests.inputs.matrix import CRASH, HANG, Case, Outcome, cases, of_ranks, record, recorded

RESULTS = Path(__file__).with_name("on_ranks.json")
REFUSED = "refused"  # by an error of this package, before data moves
LATE = "late"  # by an error of this package in `wait`, when data have moved
STOPPED = "stopped"  # in the operation, since another rank has ended the cell without it
_AT_WAIT = re.compile("differs from the collective that another rank calls")
_OURS = re.compile("Nothing was sent|has sent nothing|got one on the meta device|ValueError: .* would (?:not|receive)")
_HAS_ENDED = re.compile(r"the cell was stopped: ranks? \S+ waits? in .*, and rank \d+ has ended the cell without")
_MOST = 30  # cases in a cell
_TIMEOUT_S = 10.0
_MANY = """
import json
from tests.inputs.cases import attempt
json.dumps([attempt(*case, rank) for case in {cases!r}])
"""
_ONE = """
from tests.inputs.cases import attempt
verdict, words = attempt(*{case!r}, rank)
assert verdict != "error", words
verdict, words
"""
_IS_USABLE = "x = torch.ones(1); dist.all_reduce(x); int(x)"


def torch_of_results() -> str:
    """Return the version of torch of the recorded outcomes."""
    return str(json.loads(RESULTS.read_text())["torch"])


def run_on_ranks(session: ddp_notebook.Session, some: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Try cases in cells, and yield each with its outcome.

    Several cases share a cell if no rank can raise alone.
    """
    plain, many = recorded(), list[Case]()
    for case in some:
        verdict = plain[case.name].verdict
        if verdict == RIGHT or (verdict in (WRONG, MEMORY) and not case.is_async and "recv" not in case.operation):
            many.append(case)
            if len(many) == _MOST:
                yield from _run_many(session, many)
                many = []
        else:
            yield case, _run_one(session, case)
    if many:
        yield from _run_many(session, many)


def _run_many(session: ddp_notebook.Session, some: list[Case]) -> Iterator[tuple[Case, Outcome]]:
    try:
        result = session.run(_MANY.format(cases=[tuple(one) for one in some]), timeout_s=60, quiet=True)
    except CellTimeoutError:  # one rank was refused alone
        for case in some:
            yield case, _run_one(session, case)
        return
    by_rank = [json.loads(ast.literal_eval(result[rank].result or "")) for rank in range(WORLD)]
    for case, outcomes in zip(some, zip(*by_rank, strict=True), strict=True):
        yield case, of_ranks([_read(*one) for one in outcomes])


def _run_one(session: ddp_notebook.Session, case: Case) -> Outcome:
    try:
        result = session.run(_ONE.format(case=tuple(case)), timeout_s=_TIMEOUT_S, quiet=True)
        outcome = of_ranks([_read(*ast.literal_eval(result[rank].result or "")) for rank in range(WORLD)])
    except CellTimeoutError:
        outcome = Outcome(HANG, "")
    except RankDiedError as error:
        session.ranks.heal()
        outcome = Outcome(CRASH, str(error))
    except RankError as error:
        outcome = _read(ERROR, str(error))
    assert session.run(_IS_USABLE, timeout_s=_TIMEOUT_S, quiet=True)[0].result == str(WORLD), (
        f"unusable after {case.name}"
    )
    return outcome


def _read(verdict: str, words: str) -> Outcome:
    if verdict == ERROR and _AT_WAIT.search(words):
        return Outcome(LATE, words)
    if verdict == ERROR and _HAS_ENDED.search(words):
        return Outcome(STOPPED, words)
    return Outcome(REFUSED if verdict == ERROR and _OURS.search(words) else verdict, words)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.inputs.on_ranks")
    parser.add_argument("--only", default="", help="regular expression for the name of a case")
    parser.add_argument("--write", action="store_true", help=f"record the outcomes in {RESULTS.name}")
    given, found = parser.parse_args(), {}
    with ddp_notebook.start(WORLD, grace_s=0.5) as session:
        for case, outcome in run_on_ranks(session, (one for one in cases() if re.search(given.only, one.name))):
            found[case.name] = outcome
            print(f"{case.name:75} {outcome.verdict:7} {' '.join(outcome.words.split())[:200]}", flush=True)
            if given.write and not len(found) % 100:
                record(RESULTS, found)
    if given.write:
        record(RESULTS, found)


if __name__ == "__main__":
    main()
