"""Lessons 23 and 27 in a kernel: debugger sessions have the output that the text shows; a program becomes a cell."""

from __future__ import annotations

import re

import nbformat
import pytest

from tests.debug.driver import Debugged
from tests.lessons.test_notebooks import FOLDER

pytestmark = [pytest.mark.processes, pytest.mark.long]
CELLS = {cell.id: cell.source for cell in nbformat.read(FOLDER / "23_it_hangs.ipynb", as_version=4).cells}


def transcript(cell: str) -> tuple[list[str], list[str]]:
    """Return the commands and the other lines of the session that a text cell shows."""
    [shown] = re.findall(r"```text\n(.*?)```", CELLS[cell], re.DOTALL)
    lines = shown.splitlines()
    commands = [line.partition(") ")[2] for line in lines if line.startswith("(ranks")]
    return commands, [line for line in lines if not line.startswith("(ranks")]


@pytest.fixture(scope="module")
def user(kernel):
    kernel.run("%ddp_start 2 --gpus none --hang-after 1")
    return Debugged(kernel)


def test_a_deadlock_is_opened_on_all_ranks(user):
    assert user.run(CELLS["cell-31"]).ename == "CellTimeoutError"
    user.run(CELLS["cell-33"].replace("debug = False", "debug = True"))
    commands, lines = transcript("cell-35")
    said = user.run(CELLS["cell-34"], commands).stdout.splitlines()
    for line in lines:
        assert re.sub(r"In\[\d+\]", "In[2]", line) in [re.sub(r"In\[\d+\]", "In[2]", one) for one in said], said


def test_a_missing_message_is_sent_at_the_prompt(user):
    user.run(CELLS["cell-33"].replace("debug = False", "debug = True"))
    commands, lines = transcript("cell-40")
    blocked = CELLS["cell-39"].replace("    work = dist.isend(edge, right)\n", "").replace("    work.wait()\n", "")
    said = user.run(blocked, ["n", *commands]).stdout.splitlines()
    numbers = [re.sub(r"line \d+", "line", one) for one in said]
    assert [line for line in lines if re.sub(r"line \d+", "line", line) not in numbers] == []
    assert "dist.isend" in " ".join(commands)


def test_a_broken_program_is_put_into_a_new_cell(user):
    code = (
        "from ddp_notebook import lessons\nlessons.bug(5).edit()\nprint(get_ipython().payload_manager.read_payload())"
    )
    said = user.run(code).stdout
    assert "'source': 'set_next_input'" in said and "%%on_all_ranks --timeout 20\\nfrom torch import nn" in said
