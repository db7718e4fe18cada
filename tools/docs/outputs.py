"""Run the cells of guide pages, and replace the pasted outputs by the real ones.

    python -m tools.docs.outputs docs/guide/forecast.md docs/guide/diff.md

An output is a block that is fenced as ```text directly after a cell. Cells marked as "not run" run too if they have an
output. The page changes only if all its cells have the expected status.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.kernels import NotebookKernel, Reply

_CELL_S = 120.0
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


def with_outputs(text: str, run: Callable[[str], Reply]) -> str:
    """Return a page with real outputs.

    Args:
        text: the page.
        run: runs a cell.

    Raises:
        RuntimeError: a cell failed, although the page does not mark it as failing.

    Example:
        >>> page = "```python\\nprint(1)\\n```\\n\\n```text\\n0\\n```\\n"
        >>> with_outputs(page, lambda code: Reply(status="ok", shown=[("stdout", "1\\n")]))
        '```python\\nprint(1)\\n```\\n\\n```text\\n1\\n```\\n'
    """

    def replaced(found: re.Match[str]) -> str:
        mark, output = found["mark"] or "", found["output"]
        if mark.startswith("not run: ") and output is None:
            return found[0]
        reply = run(found["code"])
        if reply.status != "ok" and not mark:
            raise RuntimeError(f"{found['code']}\n{reply.stderr}{reply.traceback}")
        return found[0] if output is None else found[0].replace(f"```text\n{output}", f"```text\n{_output(reply)}")

    return _BLOCK.sub(replaced, text)


def _output(reply: Reply) -> str:
    """Return the text of a cell as a reader sees it, with the last line of an error."""
    lines = "".join(content for name, content in reply.shown if name in ("stdout", "stderr"))
    error = "" if reply.status == "ok" else f"{reply.ename}: {reply.evalue}\n"
    return (lines.rstrip("\n") + "\n" if lines else "") + error


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Replace the pasted outputs of guide pages by real ones.")
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        env = {**os.environ, "DDP_NOTEBOOK_RANKS": "2"}
        with tempfile.TemporaryDirectory() as folder, closing(NotebookKernel(env=env, cwd=folder)) as kernel:
            text = with_outputs(page.read_text(), functools.partial(kernel.run, timeout_s=_CELL_S))
        page.write_text(text)
        print(f"{page}: written")


if __name__ == "__main__":
    main()
