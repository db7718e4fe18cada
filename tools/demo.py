"""Run a notebook from the terminal, as `make demo` does.

Prints the title of each code cell and its output as it arrives, and at the end the text of the cells tagged "summary".
The executed notebook is saved next to the original, even if a cell has failed. If no cell fails and the ranks have
recorded something, a page with the monitor of the run is saved there too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from traitlets.config import Config

DEFAULT_NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "01_first_process_group.ipynb"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SAVE_PAGE = """\
import sys
if "ddp_notebook" in sys.modules:
    import ddp_notebook
    from ddp_notebook.run import ended_recording
    recorded = ddp_notebook.current() or ended_recording.last()
    if recorded is not None:
        recorded.recording.save_html({path!r})
"""
NO_TEXT_OF_INTEREST = ("<Figure ", "<IPython.core.display.")


class TerminalClient(NotebookClient):
    """A notebook client that prints to the terminal what a reader would see in the notebook."""

    def __init__(self, notebook: NotebookNode, out: TextIO, **options: Any) -> None:
        super().__init__(notebook, **options)
        self._out = out
        self._shown: dict[str, str] = {}  # printed text of each display that may be updated
        self._at_line_start = True
        self._unwritten = ""  # start of a line, if the output is a file
        self._code_cells = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
        self._started_at = 0.0
        self.on_cell_execute = self._announce
        self.on_cell_executed = self._close

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        content = msg["content"]
        match msg["msg_type"]:
            case "stream":
                self._write(content["text"])
            case "display_data" | "execute_result" | "update_display_data":
                self._show(content["data"], content.get("transient", {}).get("display_id"))
        output: NotebookNode | None = super().process_message(msg, cell, cell_index)
        return output

    def _announce(self, *, cell: NotebookNode, cell_index: int) -> None:
        if cell_index not in self._code_cells:  # our own cell, see `run`
            return
        number = self._code_cells.index(cell_index) + 1
        lines = [line for line in cell.source.splitlines() if line.strip()]
        title = lines[0] if lines else ""
        if title.startswith("%%") and len(lines) > 1:
            title += f"  {lines[1].strip()}"
        self._out.write(f"[{number}/{len(self._code_cells)}] {title}\n")
        self._out.flush()
        self._started_at = time.monotonic()

    def _close(self, *, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        if cell_index not in self._code_cells:
            return
        seconds = time.monotonic() - self._started_at
        self.end_line()
        self._out.write(f"    ({seconds:.2f} s)\n\n")
        self._out.flush()

    def _show(self, data: dict[str, Any], display_id: str | None) -> None:
        text = data.get("text/plain", "")
        if not text or text.startswith(NO_TEXT_OF_INTEREST) or _is_widget(data):
            return
        new = _new_text(self._shown.get(display_id, "") if display_id else "", text)
        if display_id:
            self._shown[display_id] = text
        if new:
            self.end_line()
            self._write(new)
            self.end_line()

    def _write(self, text: str) -> None:
        text = _without_colour_in_files(text, self._out)
        if not self._out.isatty():  # a file keeps text before a carriage return: write only the last state of a line
            *lines, self._unwritten = (self._unwritten + text).split("\n")
            self._out.writelines("    " + line.rstrip("\r").rpartition("\r")[2] + "\n" for line in lines)
            self._at_line_start = not self._unwritten
            self._out.flush()
            return
        for line in text.splitlines(keepends=True):
            self._out.write("    " + line if self._at_line_start else line)
            self._at_line_start = line.endswith("\n")
        self._out.flush()

    def end_line(self) -> None:
        """End an unfinished line of a cell."""
        if not self._at_line_start:
            self._write("\n")


def _without_colour_in_files(text: str, stream: TextIO) -> str:
    return text if stream.isatty() else COLOUR.sub("", text)


def _is_widget(data: dict[str, Any]) -> bool:
    return "application/vnd.jupyter.widget-view+json" in data


def _new_text(old: str, new: str) -> str:
    """Return the text that an update adds: the end of the new text, or the lines that are not in the old one."""
    if new.startswith(old):
        return new[len(old) :]
    before = set(old.splitlines())
    return "\n".join(line for line in new.splitlines() if line not in before)


def run(notebook_path: Path, executed_path: Path, cell_timeout_s: float, out: TextIO) -> int:
    """Execute the notebook and save it. Return the exit code of the command."""
    with tempfile.TemporaryDirectory() as sockets:
        # A kernel binds TCP ports a while after they were chosen. On a busy machine another process may have taken
        # them.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})
        return _run(notebook_path, executed_path, cell_timeout_s, out, config)


def _run(notebook_path: Path, executed_path: Path, cell_timeout_s: float, out: TextIO, config: Config) -> int:
    notebook = nbformat.read(notebook_path, as_version=4)
    client = TerminalClient(
        notebook,
        out,
        config=config,
        timeout=cell_timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(notebook_path.parent)}},
        store_widget_state=False,
        coalesce_streams=True,
    )
    page = executed_path.with_suffix(".html")
    page.unlink(missing_ok=True)
    # runs while the kernel still has the recording
    notebook.cells.append(new_code_cell(SAVE_PAGE.format(path=str(page))))
    started_at = time.monotonic()
    failure = None
    try:
        can_encrypt = hasattr(AsyncKernelManager, "transport_encryption")  # not in older versions of jupyter_client
        client.execute(**({"transport_encryption": "auto"} if can_encrypt else {}))
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        failure = error
    finally:
        client.end_line()
        notebook.cells.pop()
        nbformat.write(notebook, executed_path)

    if failure is not None:
        print(_without_colour_in_files(str(failure), sys.stderr), file=sys.stderr)
        print(f"{notebook_path.name} failed; see {executed_path}", file=sys.stderr)
        return 1
    out.write(_summary(notebook))
    seconds = time.monotonic() - started_at
    out.write(f"{notebook_path.name}: {seconds:.1f} s, executed notebook: {executed_path}\n")
    if page.exists():
        out.write(f"Open the monitor of this run in a browser: {page.as_uri()}\n")
    return 0


def _summary(notebook: NotebookNode) -> str:
    return "".join(
        output.text
        for cell in notebook.cells
        if "summary" in cell.metadata.get("tags", [])
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a notebook and show its output in the terminal.")
    parser.add_argument("notebook", nargs="?", type=Path, default=DEFAULT_NOTEBOOK)
    parser.add_argument("--output", type=Path, help="default: NAME.executed.ipynb beside the notebook")
    parser.add_argument("--cell-timeout", type=float, default=300, metavar="SECONDS")
    options = parser.parse_args()

    os.environ.setdefault("DDP_NOTEBOOK_ANSWERS", "shown")  # no reader guesses
    notebook_path = options.notebook.resolve()
    executed_path = options.output or notebook_path.with_suffix(".executed.ipynb")
    return run(notebook_path, executed_path.resolve(), options.cell_timeout, sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
