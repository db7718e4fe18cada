"""Send requests to all hosts in parallel."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ddp_notebook.errors import DDPNotebookError
from ddp_notebook.launch.environment import working_directory
from ddp_notebook.launch.host.host import Host
from ddp_notebook.messages.hosts import ClockRequest, ClockTimeReply, SiteReply, SiteRequest
from ddp_notebook.records.marker import marked

_T = TypeVar("_T")
_LOOK_S = 0.05
_ANSWER_S = 10.0  # for a request about files, which a network file system may delay
_CLOCK_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Reply of one host about itself."""

    host: str
    machine: str  # may have several hosts
    facts: Mapping[str, Any] = field(default_factory=dict)  # {} if it cannot be reached
    site: Mapping[str, Any] = field(default_factory=dict)  # fields of `SiteReply`; {} if not requested
    has_marked: bool = False  # the notebook could create a marker file in its directory
    clock_ns: int = 0  # difference of its clock to the notebook's
    clock_error_ns: int = 0  # error bound of `clock_ns`
    trouble: str = ""  # why it cannot be reached, with a fix


def at_once(
    hosts: Sequence[Host],
    ask: Callable[[Host], _T],
    check: Callable[[], None] = lambda: None,
    report: Callable[[Host], object] = lambda _: None,
) -> dict[str, _T | DDPNotebookError]:
    """Query each host in a separate thread. Returns the answers or the errors by name.

    Args:
        hosts: to query.
        ask: queries one host. Exceptions other than this package's errors are raised here.
        check: called often during the wait; an exception from it ends the wait.
        report: called with a host that has answered, in this thread.
    """
    done: queue.SimpleQueue[tuple[Host, _T | BaseException]] = queue.SimpleQueue()

    def work(host: Host) -> None:
        try:
            done.put((host, ask(host)))
        except BaseException as error:
            done.put((host, error))

    for host in hosts:
        threading.Thread(target=work, args=(host,), daemon=True).start()
    answers: dict[str, _T | DDPNotebookError] = {}
    while len(answers) < len(hosts):
        check()
        try:
            host, answer = done.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if isinstance(answer, BaseException) and not isinstance(answer, DDPNotebookError):
            raise answer
        answers[host.name] = answer
        if not isinstance(answer, DDPNotebookError):
            report(host)
    return {host.name: answers[host.name] for host in hosts}


def ask_all(
    hosts: Sequence[Host],
    timeout_s: float,
    report: Callable[[Host], object] = lambda _: None,
    check: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Query all hosts. A host that cannot be reached has an answer with the reason.

    Args:
        hosts: to query.
        timeout_s: seconds for each to import torch.
        report: called with a host that has answered.
        check: called often during the wait; an exception from it ends the wait.
    """
    directory = working_directory()
    with marked(Path(directory)) as marker:

        def ask(host: Host) -> Answer:
            facts = host.facts(timeout_s)
            site = host.request(SiteRequest(directory=directory, marker=marker), SiteReply, timeout_s=_ANSWER_S)
            clock_ns, error_ns = min((_clock(host) for _ in range(_CLOCK_TRIES)), key=lambda one: one[1])
            return Answer(
                host=host.name,
                machine=host.transport.machine,
                facts=facts,
                site=asdict(site),
                has_marked=bool(marker),
                clock_ns=clock_ns,
                clock_error_ns=error_ns,
            )

        answers = at_once(hosts, ask, check, report)
    machines = {host.name: host.transport.machine for host in hosts}
    return [
        Answer(host=name, machine=machines[name], trouble=str(answer)) if isinstance(answer, Exception) else answer
        for name, answer in answers.items()
    ]


def _clock(host: Host) -> tuple[int, int]:
    """Return the difference of the host's clock to this one, and the error bound: half the round-trip time."""
    sent_ns, sent = time.time_ns(), time.perf_counter_ns()
    its_ns = host.request(ClockRequest(), ClockTimeReply, timeout_s=_ANSWER_S).time_ns
    error_ns = (time.perf_counter_ns() - sent) // 2
    return its_ns - sent_ns - error_ns, error_ns
