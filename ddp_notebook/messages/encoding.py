"""Encode messages by the types of their fields.

A message is a frozen dataclass. Its first frame is JSON, `["Name", {"field": value}]`. Each `bytes` or `bytearray`
value follows as a separate frame, so pickles and tensors are never converted to text. In the JSON such a value is null.
A field may have one of these types, nested in any way:

    int, float, str, bool, None, Any    the JSON value
    X | None, list[X], tuple[X, ...], tuple[X, Y], dict[str, X], dict[int, X]
    Path                                a string
    a dataclass                         an object with its fields
    a NamedTuple                        a list
    a class with to_json and from_json  the value that these methods return and accept
    Message, or a subclass              a message inside a message

Encoding does not use pickle, and `decode` creates no object of any other class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import json

VERSION = 9  # incremented at incompatible changes of the messages, this encoding or the framing in `wire.link`

_KINDS: dict[str, type[Message]] = {}
SHOWN: set[str] = set()
_CODECS: dict[type[Message], _Codec] = {}
Frame = bytes | bytearray | memoryview
Frames = Iterator[Any]
Write = Callable[[Any, list[Any]], Any]  # value, frames to append to -> JSON
Read = Callable[[Any, Frames], Any]  # JSON, iterator over the remaining frames -> value
_to_json = json.JSONEncoder(default=str).encode  # created once: `json.dumps` with an option creates an encoder per call
_of_json = json.JSONDecoder().raw_decode  # unlike `json.loads`, does not detect the encoding first


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base class of all messages.

    Args of a subclass:
        shown: whether a Jupyter kernel shows texts of this message. Such texts must not contain surrogates. Other
        messages contain paths, in which surrogates represent bytes.
    """

    def __init_subclass__(cls, *, shown: bool | None = None) -> None:
        before = _KINDS.get(cls.__name__)
        if before is not None and before.__module__ != cls.__module__:
            raise TypeError(f"{cls.__module__} and {before.__module__} both define a message {cls.__name__}")
        _KINDS[cls.__name__] = cls  # `slots=True` creates the class twice; the second call wins and gets no `shown`
        if shown:
            SHOWN.add(cls.__name__)

    def encode(self) -> list[bytes]:
        """Return the frames: JSON of the name and the fields, then the `bytes` values in the order of the fields."""
        kind = type(self)
        codec = _CODECS.get(kind) or _Codec.of(kind)
        frames: list[Any] = [b""]
        small = {name: getattr(self, name) for name in kind.__dataclass_fields__}
        for name, write in codec.writers:
            small[name] = write(small[name], frames)
        frames[0] = _to_json([kind.__name__, small]).encode()
        return frames


def decode(frames: Sequence[Frame]) -> Message:
    """Decode the frames of `Message.encode`.

    Raises:
        ValueError: the frames are not a message of this version.

    Example:
        >>> from ddp_notebook.messages.hosts import EndReply
        >>> EndReply(left=[17]).encode()
        [b'["EndReply", {"left": [17]}]']
        >>> decode(EndReply(left=[17]).encode())
        EndReply(left=[17])
    """
    try:
        text = str(frames[0], "utf-8")
        (name, small), end = _of_json(text)
        if end < len(text):
            raise ValueError("there is more after the JSON")
        kind = _KINDS[name]
        codec = _CODECS.get(kind) or _Codec.of(kind)
        if codec.is_shown and "\\ud" in text:  # ASCII JSON also writes an emoji as two surrogates
            small = encodable(small)
        if len(small) != codec.size:
            raise ValueError("there are other fields")
        rest = iter(frames)
        next(rest)
        for field, read in codec.readers:
            small[field] = read(small[field], rest)
        if next(rest, None) is not None:
            raise ValueError("there are more frames")
        return kind(**small)
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        begin = bytes(frames[0][:80]) if frames else b""
        raise ValueError(f"not a message of version {VERSION}: {begin!r}") from error


def to_json(value: Any) -> Any:
    """Convert a dataclass or NamedTuple without `bytes` values to JSON.

    Example:
        >>> from ddp_notebook.messages.hosts import FoundFile
        >>> to_json(FoundFile("file", 3, 0, 0o644))
        ['file', 3, 0, 420, '']
    """
    frames: list[Any] = []
    made = _writer(type(value))(value, frames)
    assert not frames
    return made


def from_json(kind: type[Any], given: Any) -> Any:
    """Convert the JSON of `to_json` back to an object of class `kind`.

    Raises:
        TypeError, ValueError, KeyError: the JSON does not match the class.
    """
    return _reader(kind)(given, iter(()))


def encodable(value: Any) -> Any:
    """Replace surrogates in a JSON value by escapes. UTF-8 cannot encode surrogates, so a kernel cannot send them.

    Example:
        >>> encodable({"evalue": "\\ud800", "traceback": ["\U0001f642"]}) == {
        ...     "evalue": "\\\\ud800",
        ...     "traceback": ["\U0001f642"],
        ... }
        True
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [encodable(one) for one in value]
    return {encodable(key): encodable(one) for key, one in value.items()} if isinstance(value, dict) else value


# ---- from types to converters; None: the value is JSON already


@dataclass(frozen=True, slots=True)
class _Codec:
    """Converters for the fields of one message type that are not plain JSON."""

    size: int
    is_shown: bool
    writers: list[tuple[str, Write]]
    readers: list[tuple[str, Read]]

    @classmethod
    def of(cls, kind: type[Message]) -> _Codec:
        both = {name: _convert(its) for name, its in _types(kind).items()}
        writers = [(name, write) for name, (write, _) in both.items() if write is not None]
        readers = [(name, read) for name, (_, read) in both.items() if read is not None]
        _CODECS[kind] = codec = cls(len(both), kind.__name__ in SHOWN, writers, readers)
        return codec


def prepare() -> None:
    """Make the converters of all known messages. Later a cell may have replaced the modules that this needs."""
    for kind in list(_KINDS.values()):
        if kind not in _CODECS:
            _Codec.of(kind)


def _types(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: hints[name] for name in kind.__dataclass_fields__}


_MADE: dict[Any, tuple[Write | None, Read | None]] = {}
_PLAIN = (int, float, str, bool, NoneType, Any, dict, list)


def _convert(its: Any) -> tuple[Write | None, Read | None]:
    if its not in _MADE:
        _MADE[its] = _make(its)
    return _MADE[its]


def _writer(its: Any) -> Write:
    return _convert(its)[0] or (lambda value, frames: value)


def _reader(its: Any) -> Read:
    return _convert(its)[1] or (lambda given, frames: given)


def _make(its: Any) -> tuple[Write | None, Read | None]:
    if its in _PLAIN:
        return None, None
    if its is bytes or its is bytearray:
        return _write_bytes, _read_bytes if its is bytes else _read_bytearray
    if its is Path:
        return lambda value, frames: str(value), lambda given, frames: Path(given)
    origin, of = get_origin(its), get_args(its)
    if origin in (Union, UnionType):
        return _optional(its, [one for one in of if one is not NoneType])
    if origin is list:
        return _sequence(of[0], list)
    if origin is tuple:
        return _sequence(of[0], tuple) if of[1:] == (Ellipsis,) else _fields(of, lambda *values: values)
    if origin is dict:
        return _mapping(*of)
    if isinstance(its, type):
        if issubclass(its, Message):
            return _write_message, _reads_message(its)
        if hasattr(its, "from_json"):
            return lambda value, frames: value.to_json(), lambda given, frames: its.from_json(given)
        if is_dataclass(its):
            return _dataclass(its)
        if issubclass(its, tuple) and hasattr(its, "_fields"):
            hints = get_type_hints(its)
            return _fields([hints[name] for name in its._fields], its)
    raise TypeError(f"a message cannot contain {its}")


def _write_bytes(value: Any, frames: list[Any]) -> None:
    frames.append(value)


def _read_bytes(given: None, frames: Frames) -> Any:
    frame = next(frames)
    return bytes(frame) if isinstance(frame, memoryview) else frame  # copy: the view keeps a larger frame alive


def _read_bytearray(given: None, frames: Frames) -> bytearray:
    frame = next(frames)
    return frame if isinstance(frame, bytearray) else bytearray(frame)


def _write_message(value: Message, frames: list[Any]) -> Any:
    codec = _CODECS.get(kind := type(value)) or _Codec.of(kind)
    small = {name: getattr(value, name) for name in kind.__dataclass_fields__}
    for name, write in codec.writers:
        small[name] = write(small[name], frames)
    return [kind.__name__, small]


def _reads_message(base: type[Message]) -> Read:
    def read(given: Any, frames: Frames) -> Any:
        name, small = given
        kind = _KINDS[name]
        if not issubclass(kind, base):
            raise ValueError(f"{name} is no {base.__name__}")
        codec = _CODECS.get(kind) or _Codec.of(kind)
        if len(small) != codec.size:
            raise ValueError("there are other fields")
        for field, read in codec.readers:
            small[field] = read(small[field], frames)
        return kind(**small)

    return read


def _optional(its: Any, others: list[Any]) -> tuple[Write | None, Read | None]:
    if len(others) > 1 and any(_convert(one) != (None, None) for one in others):
        raise TypeError(f"a message cannot contain {its}: nothing tells which of these types a value has")
    write, read = (None, None) if len(others) > 1 else _convert(others[0])
    return (
        write and (lambda value, frames: None if value is None else write(value, frames)),
        read and (lambda given, frames: None if given is None else read(given, frames)),
    )


def _sequence(of: Any, kind: type[Any]) -> tuple[Write | None, Read | None]:
    write, read = _convert(of)

    def read_all(given: Any, frames: Frames) -> Any:
        return kind(given if read is None else [read(one, frames) for one in given])

    return (
        write and (lambda value, frames: [write(one, frames) for one in value]),
        None if read is None and kind is list else read_all,
    )


def _mapping(key: Any, of: Any) -> tuple[Write | None, Read | None]:
    write, read = _convert(of)
    if key not in (str, int):
        raise TypeError(f"a message cannot contain a dict with keys of type {key}")

    def read_all(given: Any, frames: Frames) -> Any:
        return {key(name): one if read is None else read(one, frames) for name, one in given.items()}

    return (
        write and (lambda value, frames: {name: write(one, frames) for name, one in value.items()}),
        None if read is None and key is str else read_all,
    )


def _fields(of: Sequence[Any], make: Callable[..., Any]) -> tuple[Write | None, Read]:
    """Return converters for a tuple or NamedTuple with these item types, as a JSON list."""
    writers, readers = [_writer(one) for one in of], [_reader(one) for one in of]

    def write_all(value: Any, frames: list[Any]) -> Any:
        return [write(one, frames) for write, one in zip(writers, value, strict=True)]

    def read_all(given: Any, frames: Frames) -> Any:
        return make(*(read(one, frames) for read, one in zip(readers, given, strict=True)))

    return write_all, read_all


def _dataclass(kind: type[Any]) -> tuple[Write, Read]:
    of = {name: (_writer(its), _reader(its)) for name, its in _types(kind).items()}

    def write_all(value: Any, frames: list[Any]) -> Any:
        return {name: write(getattr(value, name), frames) for name, (write, _) in of.items()}

    def read_all(given: Any, frames: Frames) -> Any:
        if given.keys() != of.keys():
            raise ValueError(f"other fields than those of {kind.__name__}")
        return kind(**{name: read(given[name], frames) for name, (_, read) in of.items()})

    return write_all, read_all
