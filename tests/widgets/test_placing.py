"""Preparation of the saved picture: no cell waits for a picture that it does not get."""

from __future__ import annotations

import time

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.widgets.under_cell import may_train
from ddp_notebook.widgets.view_placement import find_cell
from tests.observe.test_figures import logged

PREPARES = """
import pathlib, sys, time
from ddp_notebook.widgets.view_placement import ViewPlacement

class Holds:  # up the import of matplotlib's figures, until the test goes on
    def find_spec(self, name, path=None, target=None):
        if name == "ddp_notebook.observe.figures.bars":
            until = time.monotonic() + 60
            while not pathlib.Path({goes_on!r}).exists() and time.monotonic() < until:
                time.sleep(0.01)

sys.meta_path.insert(0, Holds())
# Of a cell that recorded something, and ended before its view came.
placing = ViewPlacement(None, None, None, "", "auto")
placing.prepare_picture()
placing.end(1)
print("ended")
"""
IS_THERE = "print('ddp_notebook.observe.figures.curves' in sys.modules)"


@pytest.mark.long
def test_only_a_cell_that_needs_a_picture_waits_for_its_import(make_kernel, tmp_path):
    kernel, goes_on = make_kernel(), tmp_path / "goes on"

    assert kernel.run(PREPARES.format(goes_on=str(goes_on)), timeout_s=30).stdout == "ended\n"

    message = kernel.start(IS_THERE)
    until = time.monotonic() + 30
    while True:  # until the kernel has begun the cell
        told = kernel.client.get_iopub_msg(timeout=until - time.monotonic())
        if told["msg_type"] == "execute_input" and told["parent_header"]["msg_id"] == message:
            break
    goes_on.touch()
    assert kernel.finish(message).stdout == "True\n", "two threads that import matplotlib find it half made"


def test_the_last_of_the_cells_with_one_prompt_is_found():
    recording = logged({0: [1.0]}, cell=1)
    logged({0: [2.0]}, cell=2, into=recording)
    logged({0: [3.0]}, cell=6, into=recording)
    recording.prompts.update({1: "In [6]", 2: "In [6]"})

    assert find_cell(recording, 6) == 2, "a restarted notebook kernel counts its prompts from 1 again"
    recording.prompts.clear()
    assert find_cell(recording, 6) == 6, "no cell has this prompt, but one has this number and no prompt"
    recording.prompts.update({6: "In [9]"})
    with pytest.raises(
        UsageError, match=r"In \[6\] was not recorded; the latest recorded cells: cell 1, cell 2, In \[9\]$"
    ):
        find_cell(recording, 6)


@pytest.mark.parametrize(
    ("code", "may"),
    [
        ("for step in range(9):\n    log(loss=step)", True),
        ("loss.backward()\noptimizer.step()", True),
        ("train_one_epoch(model)", True),
        ("%run train.py", True),
        ("trainer.fit(model)", True),
        ("print(rank)\ntotal = dist.all_reduce(torch.ones(1))", False),
        ("math.log(3); print('a step')", False),
    ],
)
def test_cells_that_may_train_are_known_by_their_code(code, may):
    assert may_train(code) is may
