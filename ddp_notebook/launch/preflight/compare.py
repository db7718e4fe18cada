"""Find differences between hosts, with fixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_notebook.launch.host.host import is_loopback
from ddp_notebook.launch.preflight.pairs import HostAddress, Unreached
from ddp_notebook.launch.preflight.query import Answer
from ddp_notebook.launch.transports.ports import ANY, in_words
from ddp_notebook.records.units import ms, size, two_figures
from ddp_notebook.version import __version__

_CLOCK_NS = 1_000_000_000  # clock difference that does not matter
_MEMORY = 1.25  # ratio of memory from which machines count as different
_OF_SPEED = ("CUDA", "GPUs", "cores")
_MISSING, _ANOTHER = "not there", "another one"
_MOST_NAMED = 4  # hosts in a sentence


class Column(NamedTuple):
    """One column of the table."""

    title: str
    text: Callable[[Answer], str]
    compared: Callable[[Answer], object]  # value that should be the same on all hosts; None if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """A problem, its place in the table, and a fix."""

    sentence: str
    marks: frozenset[tuple[str, str]] = frozenset()  # host and title of the column
    is_fatal: bool = False  # no group would form, or it would not work


def _gpus(answer: Answer) -> str:
    names = Counter(gpu["name"] for gpu in answer.facts["gpus"])
    return " + ".join(f"{count} x {name}" for name, count in names.items()) or "-"


def _cores(answer: Answer) -> str:
    usable, of = answer.facts["cores"], answer.facts["machine_cores"]
    return f"{usable}" if usable == of else f"{usable} of {of}"


def _memory(answer: Answer) -> str:
    free, of = (size(mib << 20) for mib in (answer.site["free_mib"], answer.facts["memory_mib"]))
    return f"{free} of {of} free"


def _directory(answer: Answer) -> str:
    if not answer.site["has_directory"]:
        return _MISSING
    if answer.site["has_marker"]:
        return "the same"
    return _ANOTHER if answer.has_marked else "there"


def _reached_at(answer: Answer) -> str:
    address = answer.facts["address"]
    interface = answer.facts["interfaces"].get(address, "")
    return f"{address} ({interface})" if interface else str(address)


def _clock(answer: Answer) -> str:
    off_ns = abs(answer.clock_ns)
    if off_ns <= answer.clock_error_ns:  # within the error bound
        return f"± {ms(answer.clock_error_ns)}"
    sign = "-" if answer.clock_ns < 0 else "+"
    return f"{sign}{ms(off_ns)}" if off_ns < _CLOCK_NS else f"{sign}{two_figures(off_ns / 1e9)} s"


def _minor(version: str) -> str:
    """Return a version without its last part: 3.12.1 and 3.12.4 count as the same."""
    return version.rpartition(".")[0]


COLUMNS = (
    Column("reached at", _reached_at, lambda _: None),
    Column("user", lambda answer: answer.site["user"] or "?", lambda answer: answer.site["user"]),
    Column("Python", lambda answer: answer.facts["python"], lambda answer: _minor(answer.facts["python"])),
    Column("torch", lambda answer: answer.facts["torch"], lambda answer: answer.facts["torch"]),
    Column("CUDA", lambda answer: answer.site["cuda"] or "-", lambda answer: answer.site["cuda"]),
    Column("ddp_notebook", lambda answer: answer.facts["package"], lambda answer: answer.facts["package"]),
    Column("GPUs", _gpus, _gpus),
    Column("cores", _cores, lambda answer: answer.facts["machine_cores"]),
    Column("memory", _memory, lambda _: None),
    Column("directory", _directory, _directory),
    Column("clock", _clock, lambda _: None),
)
_FATAL = {"ddp_notebook": "package", "Python": "python", "torch": "torch"}  # with the name of the fact


def _marks(title: str, hosts: Sequence[str]) -> frozenset[tuple[str, str]]:
    return frozenset((host, title) for host in hosts)


def differing(column: Column, answers: Sequence[Answer]) -> list[str]:
    """Return the hosts that differ from most others, or from the first one if there is a tie."""
    values = {answer.host: column.compared(answer) for answer in answers}
    most = Counter(values.values()).most_common(1)
    return [host for host, value in values.items() if value != most[0][0]]


def versions(answers: Sequence[Answer]) -> list[HostFinding]:
    """Find different versions: values are sent between ranks and the notebook, and groups use torch's protocols."""
    found = []
    for title, fact in _FATAL.items():
        by_host = {answer.host: str(answer.facts[fact]) for answer in answers}
        if fact == "package":
            by_host = {"the notebook": __version__, **by_host}
        if fact == "python":
            by_host = {host: _minor(version) for host, version in by_host.items()}
        by_version: dict[str, list[str]] = {}
        for host, version in by_host.items():
            by_version.setdefault(version, []).append(host)
        if len(by_version) > 1:
            said = ", ".join(f"{version} on {named(hosts)}" for version, hosts in by_version.items())
            right = by_version[__version__] if fact == "package" else max(by_version.values(), key=len)
            found.append(
                HostFinding(
                    sentence=f"{title} differs between hosts: {said}; install one version on all hosts",
                    marks=_marks(title, [host for host in by_host if host not in right]),
                    is_fatal=True,
                )
            )
    return found


def addresses(answers: Sequence[Answer]) -> list[HostFinding]:
    """Find hosts on a loopback address: hosts reach each other at the address that the notebook uses."""
    alone = [answer for answer in answers if is_loopback(answer.facts["address"])]
    if not alone or len(alone) == len(answers):
        return []
    hosts = [answer.host for answer in alone]
    return [
        HostFinding(
            sentence=f"{named(hosts)} is the notebook's own machine, reached at {alone[0].facts['address']}, which "
            "other hosts cannot reach; set the address of its network in ~/.ssh/config (HostName)",
            marks=_marks("reached at", hosts),
            is_fatal=True,
        )
    ]


def connections(failed: Sequence[Unreached], ports: range = ANY) -> list[HostFinding]:
    """Describe the network problem behind failed connections.

    Args:
        failed: the connections.
        ports: for the store, see `places`.
    """
    if not failed:
        return []
    sources: dict[tuple[str, HostAddress, str], list[str]] = {}
    for one in failed:
        sources.setdefault((one.target, one.place, one.why), []).append(one.source)
    said = [
        f"{_counted(those)} cannot connect to {target} at {place}: {why}"
        for (target, place, why), those in sources.items()
    ]
    more = f", and {len(said) - _MOST_NAMED} more" if len(said) > _MOST_NAMED else ""
    targets = list(dict.fromkeys(one.target for one in failed))
    return [
        HostFinding(
            sentence=f"{', '.join(said[:_MOST_NAMED])}{more}; {_way_out(failed, ports)}",
            marks=_marks("reached at", targets),
            is_fatal=True,
        )
    ]


def _way_out(failed: Sequence[Unreached], ports: range) -> str:
    if ports != ANY and all(one.place.ports == ANY for one in failed):
        return (
            f"the ports of --ports ({in_words(ports)}) are open, but gloo and NCCL use ports that the system chooses: "
            f"let it choose the same ports (on each host, as root: sysctl -w "
            f"net.ipv4.ip_local_port_range='{ports.start} {ports.stop - 1}'), or open all ports above 1023 of "
            "that network"
        )
    if ports != ANY and all(one.is_taken for one in failed):
        return "pass other ports, or more ports, with --ports"
    if any(one.place.is_asked for one in failed):
        return "unset GLOO_SOCKET_IFNAME, or set it to the interface of a network that these hosts share"
    if all(one.instead for one in failed):
        places = {one.target: f"{one.target} is reached at {one.instead[0]}" for one in failed}
        return f"{', '.join(places.values())}: set the addresses of that network in ~/.ssh/config (HostName)"
    return (
        "a firewall may be between them: open all ports above 1023 of that network, or set the addresses of a network "
        "that these hosts share in ~/.ssh/config (HostName)"
    )


def remarks(answers: Sequence[Answer], directory: str) -> list[HostFinding]:
    """Find problems that do not prevent a group but that the user should know.

    Args:
        answers: of hosts that can be reached.
        directory: the notebook's.
    """
    if not answers:
        return []
    every = (_bound(answers), _unlike(answers), _strangers(answers), _apart(answers, directory), _late(answers))
    return [finding for found in every for finding in found]


def _bound(answers: Sequence[Answer]) -> list[HostFinding]:
    few = [answer for answer in answers if answer.facts["cores"] < answer.facts["machine_cores"]]
    if not few:
        return []
    hosts = [answer.host for answer in few]
    return [
        HostFinding(
            sentence=f"{named(hosts)}: ranks can use only {_cores(few[0])} cores, because their starter binds "
            'them. Open MPI binds a task to one core (--mpi "--bind-to none"), Slurm to the requested cores '
            "(--cpus-per-task)",
            marks=_marks("cores", hosts),
        )
    ]


def _unlike(answers: Sequence[Answer]) -> list[HostFinding]:
    """Find hosts that differ from the others in hardware, and so in speed."""
    most_mib = max(answer.facts["memory_mib"] for answer in answers)
    unlike = {column.title: differing(column, answers) for column in COLUMNS if column.title in _OF_SPEED}
    unlike["memory"] = [answer.host for answer in answers if answer.facts["memory_mib"] * _MEMORY < most_mib]
    unlike = {title: hosts for title, hosts in unlike.items() if hosts}
    if not unlike:
        return []
    said = ", ".join(f"{title} of {named(hosts)}" for title, hosts in unlike.items())
    return [
        HostFinding(
            sentence=f"hosts differ: {said}; all ranks wait for the slowest; set the number of ranks of "
            "each host with --hosts NAME:N",
            marks=frozenset[tuple[str, str]]().union(*(_marks(title, hosts) for title, hosts in unlike.items())),
        )
    ]


def _strangers(answers: Sequence[Answer]) -> list[HostFinding]:
    users = {answer.host: answer.site["user"] for answer in answers}
    if len(set(users.values())) < 2:
        return []
    [column] = [column for column in COLUMNS if column.title == "user"]
    said = ", ".join(f"{user or 'nobody'} on {host}" for host, user in users.items())
    return [
        HostFinding(
            sentence=f"the user differs between hosts: {said}; a user may not be able to read the files of another "
            "(User in ~/.ssh/config)",
            marks=_marks("user", differing(column, answers)),
        )
    ]


def _apart(answers: Sequence[Answer], directory: str) -> list[HostFinding]:
    hosts = [answer.host for answer in answers if _directory(answer) in (_ANOTHER, _MISSING)]
    if not hosts:
        return []
    without = [answer.host for answer in answers if _directory(answer) == _MISSING]
    where = f"; ranks of {named(without)} begin in the home directory" if without else ""
    return [
        HostFinding(
            sentence=f"{directory} of the notebook is not shared with {named(hosts)}: files that cells import or "
            f"read must exist there too (--sync DIR sends them){where}",
            marks=_marks("directory", hosts),
        )
    ]


def _late(answers: Sequence[Answer]) -> list[HostFinding]:
    late = [answer.host for answer in answers if abs(answer.clock_ns) - answer.clock_error_ns > _CLOCK_NS]
    if not late:
        return []
    return [
        HostFinding(
            sentence=f"the clock of {named(late)} differs from the notebook's, so times of files and logs differ; set "
            "it with NTP, such as chrony (the recording measures the difference of clocks itself)",
            marks=_marks("clock", late),
        )
    ]


def _counted(hosts: Sequence[str]) -> str:
    return named(hosts) if len(hosts) <= _MOST_NAMED else f"{len(hosts)} hosts"


def named(hosts: Sequence[str]) -> str:
    """List hosts in a sentence.

    Example:
        >>> named(["a", "b"]), named([f"gpu{n}" for n in range(9)])
        ('a and b', 'gpu0, gpu1, gpu2, gpu3 and 5 more')
    """
    shown = list(hosts[:_MOST_NAMED])
    more = len(hosts) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
