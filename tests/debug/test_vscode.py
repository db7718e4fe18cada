"""The debugger of VS Code at two ranks, by messages that VS Code has sent. See `vscode`."""

from __future__ import annotations

import pytest

from tests.conftest import wait_until
from tests.debug.vscode import VSCode

NEXT = "%%on_all_ranks\nx = torch.ones(1); dist.all_reduce(x); print(x.item())"


@pytest.fixture(scope="module")
def vscode(kernel):
    assert kernel.run("%ddp_start 2").status == "ok"
    vscode = VSCode(kernel)
    vscode.start()  # imports debugpy on the ranks, and starts its process in the kernel
    wait_until(lambda: {"rank 0", "rank 1"} <= {one["name"] for one in vscode.ask("threads")["body"]["threads"]})
    vscode.stop()
    yield vscode
    kernel.run("%ddp_stop")


@pytest.fixture
def folder(vscode, tmp_path):
    """Return the folder in which the ranks run. The recorded cell writes a file there."""
    assert vscode.kernel.run(f"%%on_all_ranks\nimport os; os.chdir({str(tmp_path)!r})").status == "ok"
    yield tmp_path
    assert vscode.finish(vscode.kernel.start(NEXT)).stdout == "[0-1] 2.0\n"
    vscode.events.clear()


def test_debug_a_cell(vscode, folder):
    """Debug Cell, a step of rank 0, an expression, a changed variable of rank 1, and Continue of each rank."""
    _, cell, hidden = vscode.replay("debug")
    assert "70.)" in cell.stdout and "tensor(6." in cell.stdout
    assert not hidden.stderr and sorted(path.name for path in folder.iterdir()) == ["ran_0", "ran_1"]


def test_the_stop_button_runs_no_further_line(vscode, folder):
    _, cell, _ = vscode.replay("stop")
    assert cell.ename == "KeyboardInterrupt" and not list(folder.iterdir())


def test_disconnect_lets_the_ranks_run_on(vscode, folder):
    _, cell, *_ = vscode.replay("disconnect")
    assert cell.status == "ok" and len(list(folder.iterdir())) == 2


def test_pause_stops_all_ranks_and_shows_one(vscode, folder):
    _, cell, _ = vscode.replay("pause")
    assert cell.ename == "KeyboardInterrupt"


def test_run_by_line_steps_all_ranks(vscode, folder):
    _, cell, *_ = vscode.replay("by line")
    assert sorted(cell.stdout.splitlines()) in (["[0] 0", "[1] 1"], ["[0-1] 0 | 1"])
    tops = [reply["body"]["stackFrames"][0]["line"] for command, reply in vscode.replies
            if command == "stackTrace" and reply["body"]["stackFrames"]]  # fmt: skip
    assert sorted(set(tops)) == [2, 3, 4, 5]
