"""torch's test files of FSDP2, tensor parallel, DTensor and DDP in cells: correct programs cause no messages.

They are not in torch's wheel: `DDP_NOTEBOOK_TORCH_TESTS` is the folder `test/distributed` of its source, of a version
near the installed one. Tests that pass on bare ranks also run in a session with all defaults. They must pass there too,
without a reported mistake, a hang card, or a fault of this package in the log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.libraries import torchs_files
from tests.libraries.bare_ranks import LIMIT_S
from tests.long.conftest import Tally

_FOLDER = os.environ.get("DDP_NOTEBOOK_TORCH_TESTS", "")
_RANKS = int(os.environ.get("DDP_NOTEBOOK_TORCH_TESTS_RANKS", "4"))
_ALONE = "compile"  # files about torch.compile take minutes each
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not _FOLDER, reason="DDP_NOTEBOOK_TORCH_TESTS names no folder with torch's tests"),
]
FILES = sorted(
    str(path.relative_to(_FOLDER))
    for pattern in ("_composable/fsdp", "_composable", "tensor", "tensor/parallel", "")
    for path in (Path(_FOLDER) / pattern).glob("test_*.py" if pattern else "test_c10d_gloo.py")
    if _FOLDER and _ALONE not in path.name
)
_STARTS = (
    f"import sys; sys.path.append({os.getcwd()!r})\nfrom tests.libraries import torchs_files\n"
    "looks = torchs_files.Looks()"
)


def _on_bare_ranks(file: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "tests.libraries.torchs_files", str(Path(_FOLDER) / file), str(_RANKS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert ended.returncode == 0, f"{file} could not be loaded"
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def _in_a_cell(session: Any, name: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the problems of one of the tests; "" if there are none."""
    from ddp_notebook.errors import DDPNotebookError

    known = session.check().mistakes
    capsys.readouterr()
    session.run("looks.seen.clear()", quiet=True)
    code = f"ended = torchs_files.run(module, {name!r}, rank, world_size, {str(directory)!r}); seen = looks.seen"
    try:
        session.run(code, timeout_s=2 * LIMIT_S)
    except DDPNotebookError as error:
        return f"the cell: {error}"
    ended = [one for one in session["ended"].values() if one != torchs_files.PASSED]
    told = [one for one in session.check().mistakes if one not in known]
    cards = [line for line in capsys.readouterr().err.splitlines() if "no progress for" in line]
    seen = [one for ones in session["seen"].values() for one in ones]
    return "\n".join([*ended, *told, *cards, *seen])


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_said_of_torchs_own_tests(file, make_session_alone, tally: Tally, tmp_path_factory, capsys):
    bare = _on_bare_ranks(file)
    names = [name for name, ended in bare.items() if set(ended) == {torchs_files.PASSED}]
    with capsys.disabled():
        skipped = sum(all(one.startswith(torchs_files.SKIPPED) for one in ended) for ended in bare.values())
        print(f"\n{file}: {len(names)} of {len(bare)} pass on {_RANKS} bare ranks with CPUs, {skipped} are skipped")
    wrong, session = {}, None
    for n in tally(len(names), f"tests of torch's {file} in cells, without a false alarm"):
        for _ in range(2):  # repeat on new ranks: torch keeps meshes and functions of the earlier tests
            if session is None:
                session = make_session_alone(_RANKS)
                session.run(f"{_STARTS}\nmodule = torchs_files.load({str(Path(_FOLDER) / file)!r})", quiet=True)
            said = _in_a_cell(session, names[n], tmp_path_factory.mktemp("files"), capsys)
            if not said:
                break
            session.stop()
            session = None
        if said:
            wrong[names[n]] = said
    assert wrong == {}
