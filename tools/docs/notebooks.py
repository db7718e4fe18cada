"""The notebooks, executed for the site on four ranks, from the first to the last cell."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from tools.docs import fresh

WORLD_SIZE = 4
FOLDER = fresh.ROOT / "notebooks"
NOTEBOOKS = sorted(path for path in FOLDER.glob("[0-9][0-9]_*.ipynb") if not path.name.endswith(".executed.ipynb"))
TRAINING = "03_watch_it_train"  # notebook whose recording is on an interactive page
_CELL_TIMEOUT_S = 300
_WIDGET = "application/vnd.jupyter.widget-view+json"
# Paths of this machine are useless for readers, and differ between builds.
_PACKAGES = re.compile(r"(?:/[^\s'\"<>/]+)+/site-packages/")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_PYTHON = re.compile(re.escape(os.path.dirname(sys.executable) + os.sep))

# Runs in the third notebook before the ranks end: saves the recording, and the slow rank.
_KEEP = """\
import json
from pathlib import Path

session.recording.save({recording!r})
Path({facts!r}).write_text(json.dumps({{
    "slow": slow,
    "evidence": found.evidence,
    "steps": len(session.recording.steps(rank=0)),
}}))
"""


def execute_all(folder: Path, *, keep_old: bool = False) -> list[str]:
    """Execute the notebooks that have changed, or whose code has changed, into a folder.

    A notebook that fails does not stop the others: its last good execution is kept. Without one, the notebook is copied
    with the outputs that are saved in it.

    Args:
        folder: gets NAME.ipynb of each notebook, and training.npz and training.json of the recorded training run.
        keep_old: keep earlier executions, even if the notebook or the code has changed since.

    Returns:
        A sentence for each notebook that failed.

    Raises:
        CellExecutionError: the notebook of the recorded training run failed, and there is no earlier recording.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for path in NOTEBOOKS:
        kept = [folder / "training.npz", folder / "training.json"] if path.stem == TRAINING else []
        made = [folder / path.name, *kept]
        key = fresh.key_of(path.read_bytes(), _KEEP if kept else "")
        if fresh.is_made(made, key) or (keep_old and all(one.is_file() for one in made)):
            continue
        began_s = time.monotonic()
        try:
            executed = _execute(path, kept)
        except (CellExecutionError, CellTimeoutError) as error:
            has_old = all(one.is_file() for one in made)
            if kept and not has_old:
                raise
            shown = "the site shows its last good execution" if has_old else "the site shows its saved outputs"
            failed.append(f"{path.name} failed, and {shown}: {_last_line(error)}")
            print(failed[-1], flush=True)
            if not has_old:
                nbformat.write(_for_readers(nbformat.read(path, as_version=4)), made[0])
            continue
        nbformat.write(executed, made[0])
        fresh.set_made(made[0], key)
        print(f"executed {path.name} on {WORLD_SIZE} ranks in {time.monotonic() - began_s:.0f} s", flush=True)
    return failed


def _last_line(error: Exception) -> str:
    return _COLORS.sub("", str(error)).strip().splitlines()[-1]


def _execute(path: Path, kept: list[Path]) -> NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    if kept:
        recording, facts = map(str, kept)
        stop = next(at for at, cell in enumerate(notebook.cells) if cell.source.startswith("%ddp_stop"))
        keep = nbformat.v4.new_code_cell(_KEEP.format(recording=recording, facts=facts))
        notebook.cells.insert(stop, keep)
    client = NotebookClient(
        notebook,
        timeout=_CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        store_widget_state=False,
        coalesce_streams=True,
    )
    env = {**os.environ, "DDP_NOTEBOOK_RANKS": str(WORLD_SIZE), "DDP_NOTEBOOK_ANSWERS": "shown"}
    client.execute(transport_encryption="auto", env=env)
    if kept:
        del notebook.cells[stop]
    return _for_readers(notebook)


def _for_readers(notebook: NotebookNode) -> NotebookNode:
    """Prepare a notebook for a page: fold solutions, and remove data for a kernel or this machine only."""
    for cell in notebook.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "hide-input"]
            cell.metadata["mystnb"] = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(_WIDGET, None)
    cleaned = _PYTHON.sub("", _PACKAGES.sub("site-packages/", json.dumps(notebook)))
    return nbformat.from_dict(json.loads(cleaned))
