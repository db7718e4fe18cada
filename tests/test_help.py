"""Declared lines of magics: help, usage, completion and errors."""

from __future__ import annotations

import dataclasses
import re
import sys
import types

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.options import BY_NAME, TABLE, StartOptions
from ddp_notebook.launch.start_line import parse, start_line
from ddp_notebook.line_parser import WIDTH, read_expression
from ddp_notebook.magics import _MAGICS, DDPMagics
from ddp_notebook.run import magic_help, magic_lines, progress
from ddp_notebook.run.cells import cell_options
from tests.conftest import wait_until

_TAKES_OTHER_TEXT = {
    "%ddp_torchrun",
    "%ddp_memory",
    "%ddp_cancel",
    "%ddp_verify",
}  # the parser does not read the whole line


def test_every_magic_declares_its_line():
    assert set(_MAGICS) == {name for names in DDPMagics.magics.values() for name in names}


@pytest.mark.parametrize("magic", _MAGICS.values(), ids=_MAGICS)
def test_help_has_a_line_for_each_option_and_an_example(magic):
    declared, text = magic.parser(), magic.getdoc()

    lines = text.splitlines()
    assert max(map(len, lines[1:])) <= WIDTH
    assert lines[0] == f"usage: {declared.usage_line}" and declared.usage_line.split()[0] == declared.prog
    for action in declared._actions:
        assert action.help, f"{declared.prog}: {action.dest} has no help"
        name = action.option_strings[-1] if action.option_strings and not action.required else action.metavar
        shown = [line for line in lines if f"{line} ".startswith(f"  {name} ")]
        assert len(shown) == 1 and action.help.replace("%%", "%") in text, (declared.prog, name)
    assert declared.examples
    for example in declared.examples:
        assert f"\n  {example}" in text
        if example.startswith(f"{declared.prog} ") and declared.prog not in _TAKES_OTHER_TEXT:
            line = example.removeprefix(declared.prog)
            if declared is cell_options.on_ranks():
                cell_options.parse(line, cell_options.on_ranks)
            else:
                declared.parse_line(line)


def test_every_option_of_a_session_can_be_written_on_a_line():
    dests = {action.dest for action in start_line()._actions} - {"help", "check"}
    assert dests == {option.dest for option in TABLE}


@pytest.mark.parametrize(
    "line",
    [
        "--backend gloo --env A=1 B=2 --timeout 7.5",
        "--gpus 3,4 --share-gpus --grace off --hang-after off",
        "--guard on --heal --live html --fold off --on-preempt save saved",
        "--guard off --gpus none --grace 0.5",
        "--hosts gpu1,gpu2:8 --python /usr/bin/python3 --sync . --sync-large --lease 60 --ports 40000-40100",
        "--slurm",
        "--keep --keep-output 10 --keep-recording 20",
    ],
)
def test_options_are_written_as_they_are_read(line):
    given = parse(line)
    changed = given.differing(StartOptions(timeout_s=1))
    written = [option.written(given) for option in changed]
    assert parse(" ".join(written)) == dataclasses.replace(given, timeout_s=120.0)


def test_differing_options():
    assert StartOptions(world_size=2).differing(StartOptions(world_size=2, timeout_s=7)) == []
    assert StartOptions().differing(StartOptions(world_size=2)) == [], "any number of ranks fits"
    assert parse("--hosts a:1,b:1").differing(parse("--hosts a:1,b:1")) == []
    other_order = parse("--hosts b:1,a:1").differing(parse("--hosts a:1,b:1"))
    assert other_order == [BY_NAME["hosts"]], "rank 0 is on another host"
    assert parse("3 --grace off").differing(StartOptions(world_size=2)) == [BY_NAME["world_size"], BY_NAME["grace_s"]]
    one = StartOptions(world_size=1)
    assert [BY_NAME[name].written(one) for name in ("world_size", "heal", "hosts", "env", "guard")] == [
        "1 rank",
        "no --heal",
        "no --hosts",
        "no --env",
        "no --guard",
    ]


@pytest.mark.parametrize(
    ("line", "meant"),
    [("--share", "--share-gpus"), ("--hang_after 3", "--hang-after"), ("--nodes 2", ""), ("--hel", ""), ("2 3", "")],
)
def test_a_mistyped_option_names_the_one_that_was_meant(line, meant):
    with pytest.raises(UsageError) as error:
        parse(line)
    first, usage, advice = str(error.value).splitlines()
    assert first.endswith(f"; did you mean {meant}?") if meant else "did you mean" not in first
    assert usage == f"usage: {start_line().usage_line}" and advice == "%ddp_help ddp_start explains each option"


@pytest.mark.parametrize(
    ("words", "some", "not_"),
    [
        ([], {"--hosts", "--help", "--backend"}, {"auto"}),
        (["4"], {"--hosts"}, set()),
        (["--backend"], {"auto", "gloo", "nccl", "mpi"}, {"--hosts"}),
        (["--grace"], {"off"}, {"S", "--hosts"}),
        (["--gpus"], {"each", "none"}, {"3,4"}),
        (["--python"], set(), {"--hosts"}),  # IPython completes files
        (["--keep"], {"--hosts"}, {"--keep"}),
        (["--heal"], {"--hosts"}, {"--heal"}),
    ],
)
def test_completions(words, some, not_):
    found = start_line().completions(words)
    assert some <= set(found) and not not_ & set(found)
    assert bool(found) == bool(some)


def test_magics_of_features_stand_in_their_sections():
    text = magic_help.overview(_MAGICS)
    sections = {
        section.partition(":")[0].strip(): re.findall(r"^  %+(\S+)", section, re.M)
        for section in text.split("\n\n")[:-1]
    }
    assert list(sections) == ["session", "recording", "cells", "variables", "files", "help"]
    assert sections["session"][:4] == ["ddp_start", "ddp_attach", "ddp_torchrun", "ddp_status"]
    last = ["ddp_heal", "ddp_resize", "ddp_fault", "ddp_check", "ddp_memory", "ddp_verify"]
    assert sections["session"][-6:] == last
    recording = ["ddp_record", "ddp_report", "ddp_monitor", "ddp_diff", "ddp_trace", "ddp_forecast", "ddp_nan"]
    assert sections["recording"] == recording
    assert sections["cells"][1:6] == ["on_ranks", "ddp_twice", "ddp_jobs", "ddp_wait", "ddp_cancel"]


def test_overview_and_help_by_name():
    text = magic_help.overview(_MAGICS)
    assert max(map(len, text.splitlines())) <= WIDTH
    for magic in _MAGICS.values():
        assert re.search(rf"^  {re.escape(magic.parser().prog)} +[A-Z]", text, re.M)
    assert text.startswith("session:\n  %ddp_start ") and "\n\ncells:\n  %%on_all_ranks" in text
    for name in ("ddp_start", "%ddp_start", "start"):
        assert magic_help.about(name, _MAGICS) == _MAGICS["ddp_start"].getdoc()
    assert magic_help.about("%%on_all_ranks", _MAGICS).startswith("usage: %%on_all_ranks [option ...]")
    with pytest.raises(UsageError, match=r"unknown magic 'ddp_strt'; did you mean %ddp_help ddp_start\?"):
        magic_help.about("ddp_strt", _MAGICS)


# ---- the line of progress


def test_a_wait_names_the_import_of_torch_while_it_lasts(monkeypatch, capsys):
    class Spec:
        _initializing = True

    module = types.ModuleType("torch")
    monkeypatch.setattr(module, "__spec__", Spec())
    monkeypatch.setitem(sys.modules, "torch", module)
    line = progress.ProgressLine("pulling:")
    monkeypatch.setattr(progress, "_SILENT_S", 0.0)
    line.show_time()
    Spec._initializing = False
    line.show_time()
    shown = capsys.readouterr().out
    assert shown.startswith("\rpulling:  importing torch in the notebook ... 0 s\r")
    assert shown.endswith("\rpulling:  ... 0 s")


def test_a_silent_start_shows_the_time(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SILENT_S", 0.2)
    monkeypatch.setattr(progress, "_TICK_S", 0.05)
    shown = ""

    def read() -> str:
        nonlocal shown
        shown += capsys.readouterr().out
        return shown

    with progress.shown("starting:", "importing torch") as report:
        wait_until(lambda: read().startswith("\rstarting:  importing torch ... 0 s"))
        report("host server 1.0 s")
        stage = r"\rstarting:  host server 1\.0 s"
        wait_until(lambda: re.search(rf"\r *{stage}{stage}  \.\.\. ", read()))
        report("group 2.0 s")
    assert read().rpartition("\r")[2] in ("starting:  host server 1.0 s  group 2.0 s\n", "  group 2.0 s\n")


def test_a_quick_start_shows_no_time(capsys):
    with progress.shown("starting:", "importing torch") as report:
        report("host server 0.1 s")
    assert capsys.readouterr().out == "starting:  host server 0.1 s\n"


@pytest.mark.parametrize(
    ("line", "ranks", "expression"),
    [
        ("x[-1] --ranks 0", "0", "x[-1]"),
        ("x - 1 --ranks=-2:", "-2:", "x - 1"),
        ("f('x --ranks 0')", None, "f('x --ranks 0')"),
    ],
)
def test_ranks_may_follow_an_expression(line, ranks, expression):
    assert read_expression(magic_lines.peek(), line) == (ranks, expression)


@pytest.mark.parametrize("name", ["ddp_peek", "ddp_torchrun"])
def test_a_short_option_shows_the_help_of_a_line_that_is_code(name, capsys):
    magic = _MAGICS[name]
    magic(None, " -h")
    assert capsys.readouterr().out.strip() == magic.getdoc().strip()
