"""Run the same cells in a terminal, in a script, in nbclient and in papermill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pexpect
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from traitlets.config import Config

ROOT = Path(__file__).parents[1]
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_start 2",
    "%%on_all_ranks\nfor i in range(3000): print('line', i)\nprint('of rank', rank)",
    "%%on_all_ranks\nimport sys, time\nfor i in range(4):\n    print(f'\\r{i} of 3', end='', file=sys.stderr)\n"
    "    time.sleep(0.15)\nprint('rest')",
    "%%on_all_ranks\nif rank == 1: raise ValueError('no')",
    "%ddp_stop",
]
FAILING = 4


@pytest.fixture
def kernels(tmp_path) -> Config:
    """Use kernels with sockets in a folder.

    A kernel's TCP ports are chosen before it binds them, and on a busy machine another process may take one.
    """
    return Config(KernelManager={"transport": "ipc", "ip": str(tmp_path / "kernel")})


def texts(cell) -> str:
    """Return all text of a cell's outputs, in order."""
    shown = []
    for output in cell.outputs:
        if output.output_type == "stream":
            shown.append(output.text)
        elif "data" in output:
            shown.append(output.data["text/plain"] + "\n")
        else:
            shown.append(f"{output.ename}: {output.evalue}\n")
    return "".join(shown)


def check(cells) -> None:
    lines = texts(cells[2]).splitlines()
    for rank in (0, 1):
        of_rank = [line.partition("] ")[2] for line in lines if line.startswith((f"[{rank}]", "[0-1]"))]
        assert of_rank == [*(f"line {i}" for i in range(3000)), "of rank 0 | 1"]
    assert texts(cells[3]).splitlines() in (["[0-1] 3 of 3", "[0-1] rest"], ["[0-1] rest", "[0-1] 3 of 3"])
    assert "RankError: ValueError: no (rank 1); succeeded: rank 0" in texts(cells[FAILING])


def notebook():
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = new_notebook(cells=[new_code_cell(source) for source in CELLS], metadata={"kernelspec": kernel})
    made.cells[FAILING].metadata["tags"] = ["raises-exception"]
    return made


@pytest.mark.long
def test_nbclient(monkeypatch, kernels):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ran = NotebookClient(notebook(), timeout=120, config=kernels).execute()
    check(ran.cells)


JOBS = [
    "%load_ext ddp_notebook",
    "%ddp_start 2",
    "%%on_all_ranks --background\n%matplotlib inline\nimport sys, time, matplotlib.pyplot as plt\n"
    "for i in range(4):\n    print(f'\\r{i} of 3', end='', file=sys.stderr)\n    time.sleep(0.15)\n"
    "if rank == 0: plt.plot([1, 2]); plt.show()\ndist.barrier()\nprint('rest')",
    "print('of the notebook')",
    "%%on_all_ranks --background\nif rank: raise ValueError('no')",
    "%ddp_wait 1",
    "%%on_all_ranks --background\ntime.sleep(0.3); print('the last word')",
]


@pytest.mark.long
def test_nbclient_and_cells_in_the_background(monkeypatch, kernels):
    """nbclient reads the output of a cell only until it ends, so each cell waits for its job there."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = notebook()
    made.cells = [new_code_cell(source) for source in JOBS]
    made.cells[4].metadata["tags"] = ["raises-exception"]
    cells = NotebookClient(made, timeout=120, config=kernels).execute().cells
    lines = texts(cells[2]).splitlines()
    assert lines[0].startswith("job 1 is done after ")
    assert lines[1:] == ["[0-1] 3 of 3", "[0]", "<Figure size 640x480 with 1 Axes>", "[0-1] rest"]
    assert any("image/png" in output.get("data", {}) for output in cells[2].outputs)
    assert texts(cells[3]) == "of the notebook\n"
    assert texts(cells[4]).startswith("job 2 failed after ")
    assert texts(cells[4]).count("RankError: ValueError: no (rank 1)") == 1
    assert texts(cells[5]).startswith("job 1 is done after ")
    assert texts(cells[6]).splitlines()[1:] == ["[0-1] the last word"]


@pytest.mark.long
def test_papermill(monkeypatch, tmp_path, kernels):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbformat.write(notebook(), tmp_path / "in.ipynb")
    out = tmp_path / "out.ipynb"
    with pytest.raises(papermill.exceptions.PapermillExecutionError, match=r"RankError: ValueError: no \(rank 1\)"):
        papermill.execute_notebook(str(tmp_path / "in.ipynb"), str(out), progress_bar=False, config=kernels)
    check([cell for cell in nbformat.read(out, as_version=4).cells if cell.cell_type == "code"])


@pytest.mark.long
def test_papermill_ends_a_cell_without_a_rank(monkeypatch, tmp_path, kernels):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [CELLS[0], "%ddp_start 2 --grace 1", "%%on_all_ranks\nif rank == 0: dist.all_reduce(torch.ones(1))"]
    nbformat.write(new_notebook(cells=[new_code_cell(one) for one in cells]), tmp_path / "in.ipynb")
    out = str(tmp_path / "out.ipynb")
    reason = "rank 0 waits in all_reduce #1, and rank 1 has ended the cell without it"
    with pytest.raises(papermill.exceptions.PapermillExecutionError, match=f"the cell was stopped: {reason}"):
        papermill.execute_notebook(
            str(tmp_path / "in.ipynb"), out, kernel_name="python3", progress_bar=False, config=kernels
        )


@pytest.mark.long
def test_plain_ipython(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "IPython", "--simple-prompt", "--no-banner", "--colors=nocolor"],
        encoding="utf-8",
        timeout=60,
        dimensions=(50, 200),
    )
    try:

        def run(line: str) -> str:
            terminal.expect(r"In \[\d+\]: ")
            terminal.sendline(line)
            terminal.expect(r"\n")
            return line

        run("%load_ext ddp_notebook")
        run("%ddp_start 2")
        terminal.expect("backend gloo")
        run("%on_all_ranks print('hello'); print('rank', rank)")
        terminal.expect(r"\[0-1\] hello\r\n\[0-1\] rank 0 \| 1\r\n")
        run("%on_all_ranks input('Name: ') if rank == 1 else None")
        terminal.expect(r"\[1\] Name: ")
        terminal.sendline("Ann")
        terminal.expect(r"\[1\] 'Ann'")
        run("%on_all_ranks 1 / 0")
        terminal.expect(r"--- ranks 0-1 ---")
        terminal.expect("RankError: ZeroDivisionError: division by zero")
        run("%on_all_ranks import time; print('go'); time.sleep(60)")
        terminal.expect(r"\[0-1\] go")
        terminal.sendintr()
        terminal.expect(r"KeyboardInterrupt: the cell was stopped\s+ranks 0,1 were interrupted at cell line 1")
        run("%ddp_stop")
        terminal.expect("stopped 2 ranks")
        run("exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)


@pytest.mark.slow
def test_a_script_prints_everything_once():
    code = (
        "import ddp_notebook\n"
        "with ddp_notebook.start(2) as session:\n"
        '    session.run(\'dist.barrier(); print("both"); print("rank", rank)\')\n'
        "    session.run('from IPython.display import HTML; HTML(\"x\")')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("[0-1] both\n[0-1] rank 0 | 1\n[0-1] <IPython.core.display.HTML object>\n")
