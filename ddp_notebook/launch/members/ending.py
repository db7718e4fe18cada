"""The end of all processes of a session."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ddp_notebook.launch.host.host import Host
from ddp_notebook.launch.process import CONTROLLER, RANK, Processes


def end_all(processes: Processes, hosts: Sequence[Host], grace_s: float) -> list[int]:
    """End them, and all below them.

    Args:
        hosts: of the ranks.
        grace_s: seconds from `END` to SIGKILL.

    Returns:
        The ids of what could not be ended, see `Host.end_all`.
    """
    left: list[int] = []

    def end(host: Host) -> None:
        those = [process for process in processes.all.values() if process.host is host]
        ranks = [process.number for process in those if process.kind == RANK]
        left.extend(host.end_all(ranks, [process.number for process in those if process.kind != RANK], grace_s))

    with_controller = [process.host for process in processes.living(CONTROLLER)]
    first, *others = dict.fromkeys([*hosts, *with_controller])
    beside = [threading.Thread(target=end, args=(host,)) for host in others]  # each may need all of the grace
    for one in beside:
        one.start()
    end(first)
    for one in beside:
        one.join()
    return left
