"""Features can be left out: without one or all of them, ranks run cells, show output, stop and heal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_notebook.errors import RankDiedError
from ddp_notebook.rank.hooks import FEATURES
from ddp_notebook.records.switches import VARIABLE
from ddp_notebook.run import features
from tests.conftest import wait_until
from tests.test_layers import imported, modules

_MODULES = {name: module.removesuffix(".feature").removesuffix(".catalogue") for name, module in FEATURES.items()}
_SUM = "x = torch.ones(1)\ndist.all_reduce(x)\nx.item()"


def check_core(session, capsys) -> None:
    """Use each part of the core once."""
    kept = session.run(f"print('rank', rank)\n{_SUM}")
    assert {kept[rank].result for rank in (0, 1)} == {"2.0"}
    assert "[0-1] rank 0 | 1\n" in capsys.readouterr().out
    job = session.submit("while True: pass")
    wait_until(lambda: job.state == "running", 20)
    session.interrupt()
    wait_until(lambda: job.state == "cancelled", 20)
    with pytest.raises(RankDiedError):
        session.run("if rank == 1: __import__('os')._exit(3)")
    session.ranks.heal()
    healed = session.run(_SUM)
    assert {healed[rank].result for rank in (0, 1)} == {"2.0"}


def loaded(session, modules: list[str]) -> set[str]:
    """Return the modules in these folders that the ranks have imported."""
    folders = tuple(f"{one}." for one in modules)
    code = f"__import__('json').dumps([m for m in __import__('sys').modules if (m + '.').startswith({folders})])"
    found = session.run(code)
    return {found[rank].result for rank in (0, 1)}


@pytest.mark.parametrize(
    "off", [pytest.param([name], marks=pytest.mark.long) for name in FEATURES] + [list(FEATURES)], ids=",".join
)
def test_the_core_works_without(off, make_session, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, ",".join(off))
    session = make_session(cold=True)
    check_core(session, capsys)
    assert loaded(session, [_MODULES[name] for name in off]) == {"'[]'"}


def test_the_core_imports_no_feature():
    known = modules()
    of_features = tuple(f"{module}." for module in _MODULES.values())
    apart = ("ddp_notebook.rank.script.",)  # ranks of torchrun, which select their own modules
    core = [
        name
        for name in known
        if name.startswith("ddp_notebook.rank") and not f"{name}.".startswith((*of_features, *apart))
    ]
    assert len(core) > 50
    for name in core:
        found = imported(known[name].read_text(), name, known, is_folder=known[name].name == "__init__.py")
        assert [one for one in found if f"{one}.".startswith(of_features)] == [], name


# The modules and the magics of each feature of the notebook.
_NOTEBOOK = {
    "jobs": (["ddp_notebook.run.jobs"], ["ddp_jobs", "ddp_wait", "ddp_cancel"]),
    "recording": (
        ["ddp_notebook.run.record", "ddp_notebook.observe"],
        ["ddp_record", "ddp_report", "ddp_diff", "ddp_trace"],
    ),
    "findings": (["ddp_notebook.run.findings"], []),
    "forecast": (["ddp_notebook.run.forecast", "ddp_notebook.observe.forecast"], ["ddp_forecast"]),
    "nan": (["ddp_notebook.run.nan", "ddp_notebook.observe.nan"], ["ddp_nan"]),
    "monitor": (["ddp_notebook.widgets"], ["ddp_monitor"]),
    "resize": (["ddp_notebook.run.resize"], ["ddp_resize"]),
    "survive": (["ddp_notebook.run.survive", "ddp_notebook.launch.preemption"], []),
    "faults": (["ddp_notebook.run.faults"], ["ddp_fault"]),
    "twice": (["ddp_notebook.run.twice"], ["ddp_twice"]),
    "sharding": (["ddp_notebook.run.sharding"], ["ddp_memory"]),
    "verify": (["ddp_notebook.run.verify"], ["ddp_verify"]),
    "debug": (["ddp_notebook.run.debug"], ["ddp_debug"]),
    "completion": (["ddp_notebook.run.completion"], []),
    "whos": (["ddp_notebook.run.whos"], ["ddp_whos"]),
    "files": (["ddp_notebook.run.files"], ["ddp_sync", "ddp_fetch"]),
    "keep": (["ddp_notebook.run.kept", "ddp_notebook.launch.keep"], ["ddp_attach"]),
    "torchrun": (
        ["ddp_notebook.launch.elastic", "ddp_notebook.torchrun", "ddp_notebook.registry.torchrun"],
        ["ddp_torchrun"],
    ),
}
# Imported on first use.
_LATER = [f"ddp_notebook.{name}" for name in ("lessons", "launch.keep", "launch.starters")]
_CELLS = f"""
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ddp_notebook")
def run(magic, line, cell=None):
    return shell.run_line_magic(magic, line) if cell is None else shell.run_cell_magic(magic, line, cell)
run("ddp_start", "2")
run("on_all_ranks", "", {_SUM!r})
try:
    run("on_all_ranks", "--timeout 0.5", "while True: pass")
except Exception as error:
    print("stopped", type(error).__name__)
try:
    run("on_all_ranks", "", "if rank == 1: __import__('os')._exit(3)")
except Exception as error:
    print("died", type(error).__name__)
run("ddp_heal", "")
run("on_all_ranks", "", {_SUM!r})
run("ddp_status", "")
run("ddp_help", "")
run("ddp_stop", "")
print("modules", *sys.modules)
print("magics", *shell.magics_manager.magics["line"], *shell.magics_manager.magics["cell"])
"""


@pytest.mark.parametrize(
    "off",
    [
        # A torchrun job has a recording and a monitor, and imports both.
        pytest.param([name, *(["torchrun"] if name in ("recording", "monitor") else [])], marks=pytest.mark.long)
        for name in features.FEATURES
    ]
    + [list(features.FEATURES)],
    ids=",".join,
)
@pytest.mark.processes
def test_a_notebook_works_without(off):
    env = {**os.environ, VARIABLE: ",".join(off)}
    done = subprocess.run([sys.executable, "-c", _CELLS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("[0-1] 2.0") == 2, done.stdout + done.stderr
    assert "stopped CellTimeoutError" in done.stdout and "died RankDiedError" in done.stdout, done.stdout
    *_, imported, magics = done.stdout.splitlines()
    assert [one for one in imported.split() if f"{one}.".startswith(tuple(f"{m}." for m in _LATER))] == []
    for name, (folders, names) in _NOTEBOOK.items():
        if name in off:
            assert [one for one in imported.split() if f"{one}.".startswith(tuple(f"{m}." for m in folders))] == []
            assert not set(names) & set(magics.split())
        else:
            assert set(names) <= set(magics.split())


def test_with_all_features_their_modules_are_loaded(session):
    assert "'[]'" not in loaded(session, list(_MODULES.values()))


@pytest.mark.long
def test_cells_run_without_the_folders_of_three_features(tmp_path):
    off = ["rpc", "sharding", "survive"]
    root = Path(__file__).parents[1]
    for name in ("ddp_notebook", "tests"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "static", "js"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    for name in off:
        shutil.rmtree(tmp_path.joinpath(*_MODULES[name].split(".")))
    code = f"assert __import__('ddp_notebook').__file__.startswith({str(tmp_path)!r})"
    (tmp_path / "tests" / "test_copy.py").write_text(
        f"def test_ranks_run_the_copy(session):\n    session.run({code!r})\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_copy.py",
        "tests/test_cells.py",
    ]
    env = {**os.environ, VARIABLE: ",".join(off), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
