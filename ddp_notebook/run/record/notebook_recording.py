"""`Recording` and `load` with a message after an interrupt.

`observe` is also used without a notebook, and does not handle interrupts of commands.
"""

from __future__ import annotations

from ddp_notebook.observe import files
from ddp_notebook.observe.recording import Plots, Recording
from ddp_notebook.run.interrupted import OF_FUNCTIONS, OF_PLOTS, OF_RECORDING, tells_interrupt, tells_interrupts

__all__ = ["Recording", "load"]

tells_interrupts(OF_RECORDING)(Recording)
tells_interrupts(OF_PLOTS)(Plots)
load = tells_interrupt(OF_FUNCTIONS["load"])(files.load)
