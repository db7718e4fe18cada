"""A user at the prompt of a debugger."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from tests.kernels import NotebookKernel, Reply


class Debugged:
    """A notebook whose user types commands at prompts.

    Args:
        kernel: the notebook.
    """

    def __init__(self, kernel: NotebookKernel) -> None:
        self.kernel = kernel
        self.prompts: list[str] = []  # prompts of the last cell
        self.waits_s: list[float] = []  # seconds until each of these prompts, from the line before

    def run(self, code: str, lines: Sequence[str] = (), timeout_s: float = 60.0) -> Reply:
        """Run a cell, and answer its prompts. The cell must have as many prompts as there are lines.

        Args:
            lines: commands; "(3.5) p x" waits for 3.5 s before it types the command, "(stop)" presses stop.
        """
        return self.finish(self.start(code), lines, timeout_s)

    def start(self, code: str) -> str:
        """Send a cell. Return its message id."""
        self.prompts, self.waits_s = [], []
        return self.kernel.client.execute(code, allow_stdin=True)

    def finish(self, message: str, lines: Sequence[str] = (), timeout_s: float = 60.0) -> Reply:
        """Answer the prompts of a cell, and return its reply. See `run`."""
        for line in lines:
            self.prompt(timeout_s)
            self.type(line)
        return self.kernel.finish(message, timeout_s)

    def prompt(self, timeout_s: float = 60.0) -> str:
        """Wait for a prompt, and return it."""
        began_s = time.monotonic()
        try:
            asked = self.kernel.client.get_stdin_msg(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no prompt in {timeout_s:g} s, after {self.prompts}") from None
        self.waits_s.append(time.monotonic() - began_s)
        self.prompts.append(asked["content"]["prompt"])
        return self.prompts[-1]

    def type(self, line: str) -> None:
        """Type a line, see `run`."""
        if line.startswith("("):
            what, _, line = line[1:].partition(") ")
            if what == "stop)":
                self.kernel.interrupt()
                return
            time.sleep(float(what))
        self.kernel.client.input(line)
