"""Programs about training: the cause of a wrong one is named, and nothing is reported about a right one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests import conftest
from tests.training_programs.program import Program
from tests.training_programs.runner import MISLED, NAMED, SILENT, TABLES, Result, Runner, verdict

# `make test` runs these, the long tests run all.
SAMPLE = {
    "wrong": (
        "another shape on one rank",
        "an optimizer made before fully_shard",
        "gradients clipped while they are scaled",
        "a learning rate of its own on one rank",
        "inputs of a tensor parallel layer that differ",
        "another operation on one rank",
    ),
    "right": (
        "accumulation with no_sync",
        "a generative adversarial network",
        "experts that belong to ranks",
        "DDP of a model with batch norm",
        "a pipeline by hand",
        "FSDP2 of each layer, AdamW",
    ),
    "deliberate": (
        "one batch that is learned by heart",
        "one rank that evaluates",
        "only the head is trained",
        "local steps, then an average",
        "a model of each rank, as an ensemble",
        "a rank that only serves data",
    ),
}
_LEAST_NAMED = 0.9  # share of the wrong programs


# Checked after the module, not after each test: new ranks, which some programs start, stay until it ends.
nothing_is_left = pytest.fixture(scope="module", autouse=True)(conftest.nothing_is_left.__wrapped__)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def ranks(waiting_host_server) -> Iterator[Runner]:
    waiting_host_server()
    with Runner() as running:
        running.ready(2)
        yield running


def program_of(table: str, name: str) -> Program:
    (found,) = [program for program in TABLES[table] if program.name == name]
    return found


def check(table: str, result: Result, seed: int) -> None:
    found = verdict(table, result)
    wanted = {"wrong": {NAMED}, "right": {SILENT}}.get(table, {found} - {MISLED})
    assert found in wanted, f"{found}, seed {seed}:\n{result.program.code}\n----\n{result.text}"


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, names in SAMPLE.items() for name in names])
def test_a_sample_of_the_programs(ranks, table, name):
    seed = random.randrange(10_000)
    check(table, ranks.run(program_of(table, name).drawn(seed)), seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("table", ["right", "deliberate"])
def test_no_false_alarm(ranks, table):
    seed = random.randrange(10_000)
    found = {program.name: ranks.run(program.drawn(seed)) for program in TABLES[table]}
    alarms = {name: one.text for name, one in found.items() if verdict(table, one) == MISLED}
    assert not alarms, f"seed {seed}"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_most_wrong_programs_are_named(ranks):
    seed = random.randrange(10_000)
    found = {program.name: ranks.run(program.drawn(seed)) for program in TABLES["wrong"]}
    verdicts = {name: one.verdict for name, one in found.items()}
    print(f"seed {seed}: {verdicts}")
    assert {name: found[name].text for name in found if verdicts[name] == MISLED} == {}, f"seed {seed}"
    others = {name: one for name, one in verdicts.items() if one != NAMED}
    assert len(others) <= (1 - _LEAST_NAMED) * len(found), f"seed {seed}: {others}"


def test_the_tables_are_large_enough():
    assert len(TABLES["wrong"]) >= 100 and len(TABLES["right"]) >= 150 and len(TABLES["deliberate"]) >= 15
    for table, programs in TABLES.items():
        names = [program.name for program in programs]
        assert len(set(names)) == len(names), table
        assert all(program.source.startswith("https://") for program in programs), table


def test_the_place_of_a_fault_is_random_and_repeatable():
    program = program_of("wrong", "not a number from one rank")
    places = {program.drawn(seed).code for seed in range(50)}
    assert len(places) == 6 and program.drawn(7) == program.drawn(7)
    for table, programs in TABLES.items():
        for one in programs:
            drawn = one.drawn(3)
            compile(drawn.code, one.name, "exec")
            assert "$" not in "".join((drawn.code, *drawn.cause, *drawn.wrong)), (table, one.name)
