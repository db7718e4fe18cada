"""The arguments of `%ddp_start` and their error messages."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import ddp_notebook
from ddp_notebook import session_commands
from ddp_notebook.errors import SessionExistsError, UsageError
from ddp_notebook.launch.options import TABLE, Client, Keep, Mpi, Profile, Slurm, Ssh, StartOptions
from ddp_notebook.launch.start_line import parse, start_line

USAGE = f"{start_line().usage_line}\n%ddp_help ddp_start explains each option"


def test_start_takes_every_option_with_its_default():
    parameters = inspect.signature(ddp_notebook.start).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in ("report", "reuse")}
    assert defaults.pop("env") is None and StartOptions().env == {}
    assert defaults == {one.name: one.default for one in dataclasses.fields(StartOptions) if one.name != "env"}
    assert list(parameters)[:-2] == [one.name for one in dataclasses.fields(StartOptions)]


@pytest.mark.parametrize("way", [Ssh, Slurm, Mpi, Profile, Client, Keep])
def test_the_table_has_every_field_of_the_grouped_options(way):
    declared = {option.field: option.default for option in TABLE if issubclass(way, option.owner)}
    fields = {one.name: one.default for one in dataclasses.fields(way)}
    selects = {name for name, value in fields.items() if value is dataclasses.MISSING or name == "hours"}
    assert declared == {name: None if name in selects else value for name, value in fields.items()}


def test_nothing_asked_is_the_default():
    assert parse("") == StartOptions(
        world_size=None, backend="auto", gpus=None, share_gpus=False, env={}, timeout_s=120.0
    )


def test_every_option_is_read():
    for line, field, value in (
        ("4", "world_size", 4),
        ("--backend gloo", "backend", "gloo"),
        ("--backend=nccl", "backend", "nccl"),
        ("--gpus 3,4", "gpus", ("3", "4")),
        ("--gpus '3, 4,'", "gpus", ("3", "4")),
        ("--gpus GPU-5f2a,0", "gpus", ("GPU-5f2a", "0")),
        ("--share-gpus", "share_gpus", True),
        ("--env A=1", "env", {"A": "1"}),
        ("--env A=1 B=2 --env C=3", "env", {"A": "1", "B": "2", "C": "3"}),
        ("--env A=1 A=2", "env", {"A": "2"}),
        ("--env A= B=x=y 'C=two words'", "env", {"A": "", "B": "x=y", "C": "two words"}),
        ("--timeout 7.5", "timeout_s", 7.5),
    ):
        assert getattr(parse(line), field) == value, line


def test_all_options_go_together():
    line = "2 --backend gloo --gpus 3,4 --share-gpus --env A=1 --timeout 30"

    assert parse(line) == StartOptions(
        world_size=2, backend="gloo", gpus=("3", "4"), share_gpus=True, env={"A": "1"}, timeout_s=30.0
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0", "N must be at least 1, as in %ddp_start 2, got 0"),
        ("-3", "N must be at least 1, as in %ddp_start 2, got -3"),
        ("3000000", "a session has at most 4,096 ranks, got N = 3000000"),
        ("four", f"N must be a whole number of ranks, got 'four'\nusage: {USAGE}"),
        ("2.5", f"N must be a whole number of ranks, got '2.5'\nusage: {USAGE}"),
        ("--backend ucc", "unknown backend 'ucc'; choose one of auto, nccl, gloo, mpi"),
        ("--timeout 0", "--timeout must be a positive number of seconds, at most a week, e.g. --timeout 60, got 0"),
        ("--timeout -5", "--timeout must be a positive number of seconds, at most a week, e.g. --timeout 60, got -5"),
        (
            "--hosts a --lease 3",
            "--lease must be a number of seconds from 4 up, at most a week, e.g. --lease 60, got 3",
        ),
        (
            "--hang-after 0",
            "--hang-after must be a positive number of seconds, at most a week, e.g. --hang-after 5, or off, got 0",
        ),
        ("--timeout soon", f"--timeout must be a number of seconds, got 'soon'\nusage: {USAGE}"),
        ("--gpus ''", "--gpus must name at least one GPU, by its number within CUDA_VISIBLE_DEVICES, e.g. --gpus 0,1"),
        ("--gpus ,", "--gpus must name at least one GPU, by its number within CUDA_VISIBLE_DEVICES, e.g. --gpus 0,1"),
        ("--env A", f"--env takes NAME=VALUE, not 'A' (the number of ranks comes first)\nusage: {USAGE}"),
        ("--env A=1 2", f"--env takes NAME=VALUE, not '2' (the number of ranks comes first)\nusage: {USAGE}"),
        ("--env =1", f"--env takes NAME=VALUE, not '=1' (the number of ranks comes first)\nusage: {USAGE}"),
        (
            "--env RANK=1 A=2 WORLD_SIZE=2",
            "env sets RANK, WORLD_SIZE, which every rank gets from the session; leave it out",
        ),
        ("--env", f"argument --env: expected at least one argument\nusage: {USAGE}"),
        ("--gpus", f"argument --gpus: expected one argument\nusage: {USAGE}"),
        ("--nodes 2", f"unrecognized arguments: --nodes\nusage: {USAGE}"),
        ("--share", f"unrecognized arguments: --share; did you mean --share-gpus?\nusage: {USAGE}"),
        ("2 3", f"unrecognized arguments: 3\nusage: {USAGE}"),
        ("--env 'A=1", f'No closing quotation: "--env \'A=1"\nusage: {USAGE}'),
    ],
)
def test_a_mistake_says_what_to_write(line, message):
    with pytest.raises(UsageError) as error:
        parse(line)

    assert str(error.value) == message


def test_options_made_in_a_script_check_themselves():
    with pytest.raises(UsageError, match=r"^N must be at least 1, as in %ddp_start 2, got 0"):
        StartOptions(world_size=0)
    with pytest.raises(ValueError, match=r"^unknown backend 'NCCL'; choose one of auto, nccl, gloo, mpi$"):
        StartOptions(backend="NCCL")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"env": ["A=1"]}, r"^env must map names to values, e\.g\. env=.*, got \['A=1'\]$"),
        (
            {"timeout_s": "5"},
            r"^--timeout must be a positive number of seconds, at most a week, e.g. --timeout 60, got '5'",
        ),
        (
            {"grace_s": "off"},
            r"^--grace must be a number of seconds from 0 up, at most a week, e.g. --grace 5, or off, got 'off'",
        ),
    ],
)
def test_a_script_is_told_of_a_value_of_another_type(options, words):
    with pytest.raises(UsageError, match=words):
        StartOptions(**options)


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300"])
def test_a_time_that_no_clock_can_wait_for_is_a_mistake(seconds):
    with pytest.raises(UsageError, match=r"^--timeout must be .* at most a week, .* got (nan|inf|1e\+300)$"):
        parse(f"--timeout {seconds}")


def test_a_script_may_give_numbers_and_one_string():
    options = StartOptions(gpus=[3, 4], env={"A": 1})  # type: ignore[dict-item]
    assert (options.gpus, options.env) == (("3", "4"), {"A": "1"})
    assert StartOptions(gpus="0, 1").gpus == ("0", "1")


def test_a_script_gives_a_whole_number_of_ranks():
    for wrong in ("2", 2.0, True):
        with pytest.raises(UsageError, match=r"^world_size must be a positive integer, e\.g\. start"):
            StartOptions(world_size=wrong)  # type: ignore[arg-type]


def test_a_start_of_running_ranks_counts_them_correctly():
    def said(asked: StartOptions, world_size: int, dead: list[int]) -> str:
        running: Any = SimpleNamespace(
            options=StartOptions(), world_size=world_size, _is_kept=False, _kept_as="", _dead=dead
        )
        return session_commands._already(asked, running)

    ends = "; %ddp_restart starts new ranks"
    assert said(StartOptions(), 1, []) == f"1 rank is already running and keeps its variables{ends}"
    assert said(StartOptions(), 2, []) == f"2 ranks are already running and keep their variables{ends}"
    one_left = "1 of 2 ranks is already running and keeps its variables; rank 1 died, and %ddp_heal replaces dead ranks"
    assert said(StartOptions(), 2, [1]) == f"{one_left}{ends}"
    assert said(StartOptions(), 1, [0]) == f"the only rank of this session has died{ends}"
    assert said(StartOptions(), 3, [0, 1, 2]) == f"all 3 ranks of this session have died{ends}"
    differ = r"^1 rank is already running, with other options: it has 1 rank, and .* 2 ranks\. .*%ddp_stop ends it$"
    with pytest.raises(SessionExistsError, match=differ):
        said(StartOptions(world_size=2), 1, [])
