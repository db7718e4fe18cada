"""Frames on a stream, cut anywhere."""

from __future__ import annotations

import random

import pytest

from ddp_notebook.messages.framing import (
    HEAD_BYTES,
    Input,
    Numbered,
    ProcessText,
    Unpacker,
    pack_input,
    pack_message,
    pack_text,
    unpack_body,
)
from ddp_notebook.messages.hosts import DoneReply, EndReply, FilePart, StartRequest, WriteRequest
from ddp_notebook.messages.processes import Start, StoreSpec

SPEC = StoreSpec(host="::1", ports=(1024, 65536), key="ab")
START = StartRequest(
    process=3, start=Start(env={"LANG": "é", "EMPTY": ""}, cwd="/tmp", sys_path=None, threads=2, spec=SPEC)
)
WRITE = WriteRequest(folder="/tmp", parts=[FilePart("a", 4, end=(0o644, 1))], data=b"\x00{}\n")
STREAM = [
    (pack_message(START, 7), Numbered(START, 7)),
    (pack_text(3, 1, b"hello\n"), ProcessText(3, 1, b"hello\n")),
    (pack_text(2**32 - 1, 2, b"\x00\xff\x1e"), ProcessText(2**32 - 1, 2, b"\x00\xff\x1e")),
    (pack_text(0, 1, b""), ProcessText(0, 1, b"")),
    (pack_message(DoneReply()), Numbered(DoneReply(), 0)),
    (pack_input([3, 2**32 - 1], b"{}\n"), Input((3, 2**32 - 1), b"{}\n")),
    (pack_input([], b""), Input((), b"")),
    (pack_message(WRITE, 2**32 - 1), Numbered(WRITE, 2**32 - 1)),
]


def reply(number: int) -> bytes:
    return pack_message(EndReply(left=[]), number)


def unpack(pieces: list[bytes]) -> list[Numbered | ProcessText | Input]:
    unpacker = Unpacker()
    return [frame for piece in pieces for frame in unpacker.feed(piece)]


def test_frames_come_out_as_they_went_in():
    assert unpack([b"".join(packed for packed, _ in STREAM)]) == [frame for _, frame in STREAM]


def test_a_stream_may_be_cut_anywhere():
    stream = b"".join(packed for packed, _ in STREAM)
    frames = [frame for _, frame in STREAM]

    assert unpack([bytes([byte]) for byte in stream]) == frames
    for at in range(len(stream) + 1):
        assert unpack([stream[:at], stream[at:]]) == frames
    chance = random.Random(0)
    for _ in range(50):
        cuts = sorted(chance.choices(range(len(stream)), k=5))
        assert unpack([stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]) == frames


def test_a_frame_is_given_as_soon_as_it_is_complete():
    unpacker = Unpacker()
    first, second = reply(1), reply(2)

    assert [one.number for one in unpacker.feed(first + second[:-1])] == [1]  # type: ignore[union-attr]
    assert list(unpacker.feed(b"")) == []
    assert [one.number for one in unpacker.feed(second[-1:])] == [2]  # type: ignore[union-attr]


def test_a_reader_may_stop_in_between_and_loses_no_frame():
    unpacker = Unpacker()
    for frame in unpacker.feed(b"".join(map(reply, range(3)))):
        assert frame == Numbered(EndReply(left=[]), 0)
        break

    assert [one.number for one in unpacker.feed(b"")] == [1, 2]  # type: ignore[union-attr]


def test_large_text_passes_whole():
    data = bytes(range(256)) * 20_000

    assert unpack([pack_text(1, 2, data) + reply(1)]) == [ProcessText(1, 2, data), Numbered(EndReply(left=[]), 1)]


def test_a_frame_that_is_cut_or_of_another_kind_is_refused():
    body = reply(1)[HEAD_BYTES:]
    for kind, data in [(0, body[:-1]), (0, body + b" "), (0, body[:3]), (0, b""), (1, b"abc"), (2, b"\x00"), (3, body)]:
        with pytest.raises(ValueError):
            unpack_body(kind, data)
    assert unpack_body(0, bytearray(body)) == Numbered(EndReply(left=[]), 1)
