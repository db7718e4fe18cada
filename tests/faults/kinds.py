"""The processes of a session by kind, and the message about each kind that is stopped or killed.

`kinds` finds all processes of a session. A process of an unknown kind has the kind "unknown: " and its command
line, so the tests of `KINDS` fail until the new kind has an entry.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import psutil

from tests.faults.stopping import SLEEP, SUM, Stopping

CONNECT = (
    "%%on_all_ranks\nimport os\n"
    "users = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
    "users.set('key', 'value'); print(users.get('key'))"
)
_CALL = "session.client[:].apply_sync(abs, -1)"
_GROUP = "%%on_all_ranks\ngroup = dist.new_group([0, 1])\ndist.destroy_process_group(group)"
_CONT = r"kill -CONT (\d+ )*{pid}\b"
_RESUMED = r"process {pid}\).* was stopped and has been resumed; nothing is lost"
_NONE = "sum 2"  # the process has no effect on cells
_LOST = r"(one|two) was lost|rank [01] died"


class Kind(NamedTuple):
    """Messages about a kind of process.

    Args:
        line: cell or command while the process is stopped.
        stopped: pattern of the message about the stopped process.
        killed: pattern of the message about the killed process, in `after`.
        after: cell or command after the process was killed.
        remedy: command that restores the session; "" if it needs none.
        keeps: all variables are kept.
    """

    line: str
    stopped: str
    after: str
    killed: str
    remedy: str = ""
    keeps: bool = True


KINDS = {
    "rank": Kind(SLEEP, _CONT, SUM, r"rank 1 died\. %ddp_heal replaces it", "%ddp_heal", keeps=False),
    "store": Kind(_GROUP, rf"{_CONT}|was replaced", _GROUP, ""),
    "TCPStore": Kind(CONNECT, r"value", CONNECT, "value"),  # its store resumes or replaces it
    "watchdog": Kind(SLEEP, _RESUMED, SLEEP, r"replaces one that had ended; nothing is lost"),
    "controller": Kind(_CALL, _CONT, _CALL, r"\[1, 1\]|has ended"),
    "part of the controller": Kind(_CALL, _CONT, _CALL, r"\[1, 1\]|has ended"),
    "waiting host server": Kind(SUM, _NONE, SUM, _NONE),
    "watchdog of the waiting host server": Kind(SUM, _NONE, SUM, _NONE),
    "cleaner": Kind(SUM, _NONE, SUM, _NONE),
    "carrier": Kind(SLEEP, _CONT, SUM, _NONE),
    "end of a carrier": Kind(SUM, _NONE, SUM, _NONE),
    "stream": Kind(
        SLEEP, r"(one|two) has sent nothing for \d s\. Nothing is lost", SUM, _LOST, "%ddp_heal", keeps=False
    ),
    "proxy": Kind(SLEEP, _CONT, SUM, _LOST, "%ddp_heal", keeps=False),
    "ssh": Kind(SLEEP, _CONT, SUM, _LOST, "%ddp_heal", keeps=False),
    "parent": Kind(SLEEP, _RESUMED, SUM, _LOST, "%ddp_heal", keeps=False),
    "host server": Kind(
        SLEEP, _CONT, SUM, rf"%ddp_restart|%ddp_start starts another|{_LOST}", "%ddp_restart", keeps=False
    ),
    "keeper": Kind(SLEEP, _CONT, SUM, r"%ddp_restart", "%ddp_restart", keeps=False),
}
OF_JUPYTER_AND_SSHD = {"notebook", "sshd"}


def kinds(of: Stopping, keeper: int = 0) -> dict[str, list[psutil.Process]]:
    """Return the processes of a session by kind. Those of host "two" come last.

    Args:
        of: notebook of the session.
        keeper: process id of the keeper of a kept session.
    """
    known = {pid: kind for kind in ("rank", "store", "controller", "host server") for pid in of.pids(kind)}
    known |= {of.kernel.pid: "notebook"} | ({keeper: "keeper"} if keeper else {})
    roots = [psutil.Process(os.getpid()), *([psutil.Process(keeper)] if keeper else [])]
    processes = {one.pid: one for root in roots for one in (root, *root.children(recursive=True))}
    found: dict[str, list[psutil.Process]] = {}
    names: dict[int, str] = {os.getpid(): "test", **known}
    for process in sorted(processes.values(), key=lambda one: (one.create_time(), one.pid)):
        kind = names[process.pid] = names.get(process.pid) or _kind(process, names.get(process.ppid(), ""))
        if kind != "test":
            found.setdefault(kind, []).append(process)
    for those in found.values():
        those.sort(key=lambda one: " two " in f" {' '.join(one.cmdline())} ")
    return found


def _kind(process: psutil.Process, parent: str) -> str:
    command, name = " ".join(process.cmdline()), process.name()
    is_python = name.startswith("python")
    children = {
        "host server": "watchdog",
        "waiting host server": "watchdog of the waiting host server",
        "store": "TCPStore",
        "controller": "part of the controller",
        "ssh": "proxy",
        "proxy": "carrier",
        "end of a carrier": "stream",
    }
    if parent in children:
        return children[parent]
    if name.startswith("sshd"):
        return "sshd"
    if parent == "test":  # sessions of other tests
        return "test"
    if parent in ("notebook", "keeper"):
        if name == "ssh":
            return "ssh"
        if name == "sh" and "rm -rf" in command:
            return "cleaner"
        if is_python and "transports.local import main" in command:
            return "waiting host server"
    if parent == "sshd" and is_python:
        return "end of a carrier" if "transports.reconnecting import main" in command else "parent"
    return f"unknown: {command[:200]}"
