"""When views prepare what stays of them: no cell waits for a picture that it does not get."""

from __future__ import annotations

import time

import pytest

PREPARES = """
import pathlib, sys, time
from ddp_notebook.widgets.placing import Placing

class Holds:  # up the import of matplotlib's figures, until the test goes on
    def find_spec(self, name, path=None, target=None):
        if name == "ddp_notebook.observe.figures.bars":
            until = time.monotonic() + 60
            while not pathlib.Path({goes_on!r}).exists() and time.monotonic() < until:
                time.sleep(0.01)

sys.meta_path.insert(0, Holds())
# Of a cell that recorded something, and ended before its view came.
placing = Placing(None, None, None, "", "auto")
placing.prepare_picture()
placing.end(1)
print("ended")
"""
IS_THERE = "print('ddp_notebook.observe.figures.curves' in sys.modules)"


@pytest.mark.long
def test_a_cell_does_not_wait_for_the_import_of_a_picture_that_it_does_not_get_and_the_next_one_does(
    make_kernel, tmp_path
):
    kernel, goes_on = make_kernel(), tmp_path / "goes on"

    assert kernel.run(PREPARES.format(goes_on=str(goes_on)), timeout_s=30).stdout == "ended\n"

    message = kernel.start(IS_THERE)
    until = time.monotonic() + 30
    while True:  # the kernel has begun with the cell
        told = kernel.client.get_iopub_msg(timeout=until - time.monotonic())
        if told["msg_type"] == "execute_input" and told["parent_header"]["msg_id"] == message:
            break
    goes_on.touch()
    assert kernel.finish(message).stdout == "True\n", "two threads that import matplotlib find it half made"
