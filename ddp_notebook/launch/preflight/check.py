"""`%ddp_start --check` and `ddp_notebook.check`: connect to hosts and compare them, without starting a rank."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ddp_notebook.errors import DDPNotebookError, UsageError
from ddp_notebook.launch.environment import working_directory
from ddp_notebook.launch.hosts import DirectHosts, placed
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.placement import Placement
from ddp_notebook.launch.preflight import compare, fit
from ddp_notebook.launch.preflight.pairs import routes
from ddp_notebook.launch.preflight.query import Answer, ask_all
from ddp_notebook.launch.preflight.table import HostTable
from ddp_notebook.launch.starters.choice import choose
from ddp_notebook.on_rank import refuse_on_rank


def survey(asked: StartOptions, report: Callable[[str], None] = lambda _: None) -> HostTable:
    """Connect to the hosts of a start and compare them.

    Args:
        asked: options of the start.
        report: called with a line for each host that has answered.
    """
    refuse_on_rank("check()")
    if starter := choose(asked):
        try:
            return HostTable(script=starter.preview())
        finally:
            starter.end()
    began = time.monotonic()
    hosts = DirectHosts(asked)
    try:
        answers = ask_all(
            hosts.all, asked.timeout_s, lambda host: report(f"{host.label} {time.monotonic() - began:.1f} s")
        )
        reached = [answer for answer in answers if not answer.trouble]
        names = {answer.host for answer in reached}
        found: list[compare.HostFinding] = []
        if not asked.is_here:
            found += _fatal([host for host in hosts.all if host.name in names], asked.port_range)
        hosts.fit = not found
        found += compare.remarks(reached, working_directory())
    finally:
        hosts.end()
    plan = ""
    if len(reached) == len(answers) and not any(finding.is_fatal for finding in found):
        try:
            facts = {answer.host: answer.facts for answer in reached}
            machines = {answer.host: answer.machine for answer in reached}
            plan = _tried(reached) + _words(placed(asked, facts, machines, {**os.environ, **asked.env}))
        except UsageError as error:
            found.append(compare.HostFinding(sentence=str(error), is_fatal=True))
    return HostTable(answers=tuple(answers), findings=tuple(found), plan=plan)


def _fatal(hosts: list[Any], ports: range) -> list[compare.HostFinding]:
    try:
        return fit.fatal(hosts, ports=ports)
    except DDPNotebookError as error:
        return [compare.HostFinding(sentence=str(error), is_fatal=True)]


def _tried(answers: list[Answer]) -> str:
    """Describe the successful connection tests between hosts; "" for a single machine."""
    number = len(routes(list(dict.fromkeys(answer.machine for answer in answers))))
    return f"they reach each other: {number} connections were tried\n" if number else ""


def _words(placed: Placement) -> str:
    n = placed.world_size
    ranks = f"{n} rank{'s' * (n != 1)} would start, by {placed.backend}"
    counts = Counter(placed.hosts)
    return ranks if len(counts) == 1 else f"{ranks}: {', '.join(f'{k} on {host}' for host, k in counts.items())}"
