"""Run benchmarks in sequence: `python -m tests.benchmarks [NAME ...] [--write]`, from the root of the repository."""

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

_OF_STARTS = {"start", "scale", "hosts", "jobs"}  # benchmarks that repeat whole starts
_ALL = (
    *(start, cell, scale, hosts, jobs, many, output, collective, completion, debugger, rpc, intake, recording, cold),
    *(pipelines, monitor, memory, survive, values),
)


def main() -> None:
    benchmarks = {module.__name__.rpartition(".")[2]: module for module in _ALL}
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(benchmarks)}; all")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {results.FILE.name}")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    parser.add_argument("--blocks", type=int, default=5, help="blocks of cells of each kind")
    given = parser.parse_args()
    if unknown := set(given.names) - set(benchmarks):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; the names are {', '.join(benchmarks)}")
    if given.names and given.write:
        parser.error("--write replaces the whole table: leave out the names")
    os.environ.pop("PYTHONUNBUFFERED", None)
    when = results.moment()
    print(when)
    figures = []
    with tempfile.TemporaryDirectory(prefix="ipython-") as directory:
        os.environ["IPYTHONDIR"] = directory
        for name in given.names or benchmarks:
            options = {"rounds": given.rounds} if name in _OF_STARTS else {}
            options |= {"blocks": given.blocks} if name == "cell" else {}
            measured = benchmarks[name].measure(**options)
            figures += measured
            # All of them take about an hour. One that fails must not lose the others.
            print("", *results.table(measured), sep="\n", flush=True)
    if given.write:
        results.replace_section("figures", [when, "", *results.table(figures)])


if __name__ == "__main__":
    main()
