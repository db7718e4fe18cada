"""Run the tests with each combination of versions: `make test-matrix`, or with some of them: `MATRIX="newest
colab"`."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.results import replace_section
from tests.matrix.build import ROOT, build
from tests.matrix.environments import ENVIRONMENTS, Environment

# Each one runs even if another one has failed.
_TARGETS = (
    *("tests-without-ranks", "tests-of-ranks", "tests-of-recording", "tests-of-private-interfaces"),
    *("tests-of-daily-tools", "tests-of-torch-errors"),
)
_PASSED = "passed"
_SHOWN = ("torch", "ipykernel", "ipywidgets", "ipython", "ipyparallel")
_VERSIONS = f"""
import platform
from importlib.metadata import version
print(platform.python_version(), *(version(name) for name in {_SHOWN}))
"""
_SUMMARY = re.compile(r"^=+ (?P<counts>.*) in [\d.]+s.*=+$|^(?P<short>\d+ passed.*) in [\d.]+s.*$", re.MULTILINE)


def main() -> None:
    names = [environment.name for environment in ENVIRONMENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(names)}; all")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="where the environments are kept")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; the combinations are {', '.join(names)}")
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_run(one, folder) for one in ENVIRONMENTS if not given.names or one.name in given.names]
    is_green = all(f"| {_PASSED}: " in row for row in rows)
    head = ["| environment | Python | " + " | ".join(_SHOWN) + " | result |", "|---" * (len(_SHOWN) + 3) + "|"]
    table = [f"{datetime.date.today().isoformat()}:", "", *head, *rows]
    print("", *table, sep="\n")
    if not given.names:
        replace_section("versions", table)
    sys.exit(0 if is_green else 1)


def _run(environment: Environment, folder: Path) -> str:
    """Return the table row of one environment."""
    try:
        python = build(environment, folder)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return _row(environment, [environment.python, environment.torch, *["?"] * (len(_SHOWN) - 1)], str(error))
    versions = subprocess.run([python, "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout.split()
    options = {"PYTEST_ADDOPTS": "-W ignore::DeprecationWarning"} if environment.deprecates else {}
    log = folder / f"{python.parents[1].name}.txt"
    began = time.monotonic()
    print(f"{environment.name}: {log}", flush=True)
    with open(log, "w") as file:
        status = subprocess.run(
            ["make", "--no-print-directory", "--keep-going", *_TARGETS, f"BIN={python.parent}"],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | options,
        ).returncode
    counts = [found["counts"] or found["short"] for found in _SUMMARY.finditer(log.read_text())]
    verdict = _PASSED if status == 0 else "FAILED"
    return _row(environment, versions, f"{verdict}: {'; '.join(counts)} ({time.monotonic() - began:.0f} s)")


def _row(environment: Environment, versions: list[str], result: str) -> str:
    row = "| " + " | ".join([environment.name, *versions, result]) + " |"
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
