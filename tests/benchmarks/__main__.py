"""Run all benchmarks in sequence: `python -m tests.benchmarks [--write]`, from the root of the repository."""

from __future__ import annotations

import argparse
import os
import tempfile

from tests.benchmarks import (
    cell,
    cold,
    collective,
    completion,
    debugger,
    hosts,
    intake,
    jobs,
    many,
    memory,
    monitor,
    output,
    pipelines,
    recording,
    results,
    rpc,
    scale,
    start,
    survive,
    values,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"keep the table in {results.FILE.name}")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of cells of each kind")
    given = parser.parse_args()
    os.environ.pop("PYTHONUNBUFFERED", None)
    when = results.moment()
    with tempfile.TemporaryDirectory(prefix="ipython-") as directory:
        os.environ["IPYTHONDIR"] = directory
        figures = [
            *start.measure(rounds=given.rounds),
            *cell.measure(blocks=given.blocks),
            *scale.measure(rounds=given.rounds),
            *hosts.measure(rounds=given.rounds),
            *jobs.measure(rounds=given.rounds),
            *many.measure(),
            *output.measure(),
            *collective.measure(),
            *completion.measure(),
            *debugger.measure(),
            *rpc.measure(),
            *intake.measure(),
            *recording.measure(),
            *cold.measure(),
            *pipelines.measure(),
            *monitor.measure(),
            *memory.measure(),
            *survive.measure(),
            *values.measure(),
        ]
    table = results.table(figures)
    print("", when, "", *table, sep="\n")
    if given.write:
        results.replace_section("figures", [when, "", *table])


if __name__ == "__main__":
    main()
