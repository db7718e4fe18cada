"""First message of a connection or of a started process, as one line of text.

Its reader does not know yet which version of this package or which user wrote it. `to_line` and `from_line` use the
encoding of all messages, without `bytes` values.

notebook -> keeper               AttachSession  GetKeeperState  StopKeeper (subclasses of KeeperRequest)
keeper -> notebook               Admitted  Refused  KeeperState
notebook -> rank of torchrun     ObserveScript
rank of torchrun -> notebook     Admitted  Refused  Replaced
notebook -> ssh, on the host     StartSshServer
notebook -> its ProxyCommand     DialHost
ProxyCommand -> ssh, on the host StartCarrier
notebook -> outpost              Invitation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ddp_notebook.messages.encoding import VERSION, Message, decode
from ddp_notebook.messages.processes import Address
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json

M = TypeVar("M", bound=Message)


class OtherVersionError(ValueError):
    """The message was written by another version of this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperRequest(Message):
    """Base class of the first messages to a keeper."""

    secret: str  # from the registry entry of the session


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSession(KeeperRequest):
    """Attach the notebook to a kept session."""

    version: str  # version of this package in the notebook
    environment: str  # `sys.prefix` of the notebook
    about: str  # description of the notebook
    take_over: bool = False  # take over from the notebook that drives the session
    looks: bool = False  # attach as an observer, which cannot run cells


@dataclass(frozen=True, slots=True, kw_only=True)
class GetKeeperState(KeeperRequest):
    """Request the state of a kept session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopKeeper(KeeperRequest):
    """Stop a kept session. The reply is sent when the session has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperState(Message):
    """State of a kept session."""

    is_running: bool  # False: it is starting, and the other fields are empty
    ranks: int = 0
    hosts: str = ""
    driver: str = ""  # description of the notebook that drives the session; "" if none does
    running: list[tuple[int, float]]  # for each running cell: number in its prompt, seconds since its start
    unshown: int = 0  # finished cells that no notebook has shown
    waiting: int = 0  # queued jobs
    alone_s: float = 0.0  # seconds without a notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(Message):
    """The connection is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The connection is rejected."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveScript(Message):
    """Attach the notebook to a rank of a torchrun job."""

    wire: int  # version of the messages
    who: str  # description of the notebook
    takes: bool  # replace another attached notebook
    address: Address  # address at which the notebook listens
    round: int  # number of the job's attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced(Message):
    """Another notebook has attached and replaced this one."""

    by: str  # description of that notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSshServer(Message):
    """Start a host server at the remote end of an ssh."""

    wire: int  # version of the messages
    env: dict[str, str]  # added to the remote environment
    lease_s: float  # the server exits after this many seconds without a received byte


@dataclass(frozen=True, slots=True, kw_only=True)
class DialHost(Message):
    """Connection parameters of a ProxyCommand for the host of a stream."""

    wire: int  # version of the messages
    command: list[str]  # ssh command that runs `launch.transports.reconnecting` on the host
    token: str  # identifies the stream
    lease_s: float  # the stream ends after this many seconds without a connection


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCarrier(Message):
    """Carry a stream through an ssh; sent to its remote end."""

    wire: int  # version of the messages
    token: str  # identifies the stream
    lease_s: float
    is_first: bool  # True for the first connection of the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation(Message):
    """Connection parameters of an outpost.

    They are secret: stored in a file or a variable that only the user can read.
    """

    wire: int  # version of the messages
    control: str  # "tcp://10.0.0.1:40123"
    server_key: str
    public_key: str
    secret_key: str
    lease_s: float
    env: dict[str, str]  # added to the environment of the task
    saves: bool  # True: the outpost sends `Warned` when a signal announces the end of the job


def to_line(message: Message) -> bytes:
    """Encode a message as a line.

    Example:
        >>> to_line(Refused(why="no"))
        b'["Refused", {"why": "no"}]\\n'
    """
    [frame] = message.encode()
    return frame + b"\n"


def from_line(line: bytes | bytearray | str, *kinds: type[M]) -> M:
    """Decode the message of a line. Errors do not contain the line, because it may contain secrets.

    Args:
        line: line of text.
        kinds: expected message types.

    Raises:
        OtherVersionError: another version of this package wrote the line.
        ValueError: the line is not an expected message.

    Example:
        >>> from_line(b'["Refused", {"why": "no"}]', Admitted, Refused)
        Refused(why='no')
    """
    data = line.encode() if isinstance(line, str) else bytes(line)
    wire = _version_of(data)
    if wire != VERSION:
        raise OtherVersionError(
            f"the other side uses version {wire} of the messages between processes, and this side version {VERSION}: "
            "install the same ddp_notebook on both sides"
        )
    try:
        message = decode([data.strip()])
    except ValueError:
        message = None
    if not isinstance(message, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"expected the message {expected} of version {VERSION}, got another line")
    return message


def _version_of(data: bytes) -> int:
    """Return the version in a line; the version of this package if the line has none."""
    try:
        _, fields = json.loads(data)
        return int(fields.get("wire", VERSION))
    except (AttributeError, TypeError, ValueError):
        return VERSION
