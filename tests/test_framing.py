"""The stream between a host server and its owner, cut anywhere."""

from __future__ import annotations

import random
from typing import Any

from ddp_notebook.launch.host.framing import Input, Text, Unpacker, pack_command, pack_input, pack_text

COMMAND = {"op": "start", "process": 3, "spec": {"env": {"LANG": "é", "EMPTY": ""}, "cwd": "/tmp"}}
STREAM = [
    (pack_command(COMMAND), COMMAND),
    (pack_text(3, 1, b"hello\n"), (3, 1, b"hello\n")),
    (pack_text(2**32 - 1, 2, b"\x00\xff\x1e"), (2**32 - 1, 2, b"\x00\xff\x1e")),
    (pack_text(0, 1, b""), (0, 1, b"")),
    (pack_command({}), {}),
    (pack_input([3, 2**32 - 1], b"{}\n"), Input((3, 2**32 - 1), b"{}\n")),
    (pack_input([], b""), Input((), b"")),
    (pack_command({"op": "files", "id": 7}, b"\x00{}\n"), {"op": "files", "id": 7, "data": b"\x00{}\n"}),
]


def unpack(pieces: list[bytes]) -> list[dict[str, Any] | Text | Input]:
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
    first, second = pack_command({"id": 1}), pack_command({"id": 2})

    assert list(unpacker.feed(first + second[:-1])) == [{"id": 1}]
    assert list(unpacker.feed(b"")) == []
    assert list(unpacker.feed(second[-1:])) == [{"id": 2}]


def test_a_reader_may_stop_in_between_and_loses_no_frame():
    unpacker = Unpacker()
    for frame in unpacker.feed(b"".join(pack_command({"id": number}) for number in range(3))):
        assert frame == {"id": 0}
        break

    assert list(unpacker.feed(b"")) == [{"id": 1}, {"id": 2}]


def test_large_text_passes_whole():
    data = bytes(range(256)) * 20_000

    assert unpack([pack_text(1, 2, data) + pack_command({"after": True})]) == [(1, 2, data), {"after": True}]
