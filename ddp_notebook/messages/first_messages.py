"""The first message of a connection or of a started process, as one line of text.

Whatever reads it does not know yet which version of this package, or which user, wrote it. `to_line` and `from_line`
make a line of a message in the encoding of all messages, without `bytes` values.

notebook -> keeper               AttachSession  GetKeeperState  StopKeeper, each a KeeperRequest
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
    """Base of the first messages to a keeper."""

    secret: str  # from the session's entry


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachSession(KeeperRequest):
    """A notebook attaches to a kept session."""

    version: str  # the notebook's version of this package
    environment: str  # `sys.prefix` of the notebook
    about: str  # description of the notebook
    take_over: bool = False  # from the notebook that drives the session
    looks: bool = False  # and does not drive it


@dataclass(frozen=True, slots=True, kw_only=True)
class GetKeeperState(KeeperRequest):
    """Asks a keeper for its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopKeeper(KeeperRequest):
    """Ends a kept session. The reply comes when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperState(Message):
    """The state of a kept session."""

    is_running: bool  # False: it starts, and the other fields are empty
    ranks: int = 0
    hosts: str = ""
    driver: str = ""  # description of the notebook that drives it; "": there is none
    running: list[tuple[int, float]]  # number in the prompt of each running cell, and seconds for which it runs
    unshown: int = 0  # ended cells that no notebook has shown
    waiting: int = 0  # jobs in the queue
    alone_s: float = 0.0  # without a notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted(Message):
    """The connection is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The connection is not accepted."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveScript(Message):
    """A notebook attaches to a rank of a torchrun job."""

    wire: int  # version of the messages
    who: str  # description of the notebook
    takes: bool  # in place of another notebook that is attached
    address: Address  # the notebook listens there
    round: int  # number of the job's attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced(Message):
    """Another notebook has attached in place of this one."""

    by: str  # description of that notebook


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSshServer(Message):
    """Starts a host server at the other end of an ssh."""

    wire: int  # version of the messages
    env: dict[str, str]  # on top of the environment there
    lease_s: float  # seconds without a byte after which the server ends


@dataclass(frozen=True, slots=True, kw_only=True)
class DialHost(Message):
    """Tells a ProxyCommand how to connect to the host of a stream."""

    wire: int  # version of the messages
    command: list[str]  # ssh, to run `transports.reconnecting` there
    token: str  # names the stream
    lease_s: float  # seconds without a connection after which the stream ends


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCarrier(Message):
    """Has an ssh carry a stream at the other end."""

    wire: int  # version of the messages
    token: str  # names the stream
    lease_s: float
    is_first: bool  # the first connection of the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation(Message):
    """All that an outpost needs to reach its notebook. Secret: in a file or a variable that only its user can read."""

    wire: int  # version of the messages
    control: str  # "tcp://10.0.0.1:40123"
    server_key: str
    public_key: str
    secret_key: str
    lease_s: float
    env: dict[str, str]  # on top of the environment of the task
    saves: bool  # a signal that the job ends soon makes the outpost send a `Warned`


def to_line(message: Message) -> bytes:
    """Return a message as a line.

    Example:
        >>> to_line(Refused(why="no"))
        b'["Refused", {"why": "no"}]\\n'
    """
    [frame] = message.encode()
    return frame + b"\n"


def from_line(line: bytes | bytearray | str, *kinds: type[M]) -> M:
    """Return the message of a line. Errors do not contain the line: it may have secrets.

    Args:
        kinds: the kinds that are expected.

    Raises:
        OtherVersionError: another version of this package wrote it.
        ValueError: it contains something else.

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
    """Return the version that a line names; this one if it names none."""
    try:
        _, fields = json.loads(data)
        return int(fields.get("wire", VERSION))
    except (AttributeError, TypeError, ValueError):
        return VERSION
