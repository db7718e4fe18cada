"""The shell command `python -m ddp_notebook diff A B`, for continuous integration."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import NoReturn

from ddp_notebook.errors import DDPNotebookError, MissingRecordingError, UsageError
from ddp_notebook.observe.compare.named import compare_named, is_missing
from ddp_notebook.observe.writing import in_a_folder, write_whole
from ddp_notebook.records.units import percent

_PERCENT = re.compile(r"(\d+(?:\.\d*)?)\s*%?")
BAD_INPUT = 2
USAGE = "usage: python -m ddp_notebook diff A B [--fail-above 10%] [--json FILE] [--html FILE]"


def run(arguments: list[str]) -> int:
    """Compare two recordings. Return 0, 1 if B is slower than `--fail-above`, or 2 for bad input.

    Args:
        arguments: the words after `diff`.
    """
    try:
        given = _parser().parse_args(arguments)
        limit = None if given.fail_above is None else _share(given.fail_above)
        for name in (given.a, given.b):
            if is_missing(name):
                raise MissingRecordingError(
                    f"{name} does not exist: name a saved recording, or a folder of DDP_NOTEBOOK_RECORD"
                )
        found = compare_named([given.a, given.b], _no_session)
        if given.json:
            text = json.dumps(found.to_json(), indent=1).encode()
            write_whole(in_a_folder(given.json), lambda file: file.write(text + b"\n"))
        if given.html:
            found.save_html(given.html)
    except SystemExit:  # after --help
        return 0
    except DDPNotebookError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(found)
    if limit is None:
        return 0
    if found.exceeds(limit):
        print(f"\nB is {percent(found.time.share)} slower than A, more than {percent(limit)}", file=sys.stderr)
        return 1
    if found.time.share > limit:
        print(f"\nB is {percent(found.time.share)} slower than A, but that is not more than the noise", file=sys.stderr)
    return 0


def _no_session() -> NoReturn:
    raise UsageError("this command compares files and folders: name two recordings, not numbers of cells")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {USAGE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m ddp_notebook diff", allow_abbrev=False, description="Compare two runs.")
    parser.add_argument("a", metavar="A", help="a saved recording, or a folder of DDP_NOTEBOOK_RECORD")
    parser.add_argument("b", metavar="B", help="the other one; run.npz:6 is the training run In [6] of a recording")
    parser.add_argument(
        "--fail-above", metavar="SHARE", help="exit with status 1 if B is slower by more than this, such as 10%%"
    )
    parser.add_argument("--json", metavar="FILE", help="write the comparison as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the comparison as an HTML page")
    return parser


def _share(text: str) -> float:
    """Return a percentage as a share.

    Example:
        >>> _share("10%"), _share("2.5")
        (0.1, 0.025)
    """
    if (found := _PERCENT.fullmatch(text.strip())) is None:
        raise UsageError(f"--fail-above must be a percentage such as 10%, got {text!r}")
    return float(found[1]) / 100
