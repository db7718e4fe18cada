"""The output pipe of a rank, split into the text of each cell."""

from __future__ import annotations

from ddp_notebook.messages.ranks import Display
from ddp_notebook.wire.marks import CellEnd, DisplayMark, since_last_cell
from ddp_notebook.wire.text import Ordered, Piece, TextSplitter

TOKEN = "0123456789abcdef"  # same length as the token of a session


def mark(token: str, cell: int, duration_us: int | None = None) -> bytes:
    return CellEnd(cell, None if duration_us is None else duration_us / 1e6).encode(token)


def display_mark(token: str, place: int) -> bytes:
    return DisplayMark(place).encode(token)


def split(*reads: bytes) -> list[Piece]:
    """Return the pieces for these reads. Neighbouring texts are joined, because reads end at random places."""
    splitter = TextSplitter(TOKEN)
    joined: list[Piece] = []
    for read in reads:
        for piece in splitter.feed(read):
            if joined and isinstance(piece, str) and isinstance(joined[-1], str):
                joined[-1] += piece
            else:
                joined.append(piece)
    return joined


def assert_split(stream: bytes, expected: list[Piece]) -> None:
    """Split the stream in two at each byte, and byte by byte: the result is the same."""
    for at in range(len(stream) + 1):
        assert split(stream[:at], stream[at:]) == expected, f"cut before byte {at}"
    assert split(*(bytes([byte]) for byte in stream)) == expected


def test_text_and_the_ends_of_cells_come_in_order():
    stream = b"one\n" + mark(TOKEN, 1) + b"between\n" + mark(TOKEN, 2) + mark(TOKEN, 31) + b"later"

    assert_split(stream, ["one\n", CellEnd(1), "between\n", CellEnd(2), CellEnd(31), "later"])


def test_display_marks_come_in_order_and_can_split_a_character():
    stream = b"one\n" + display_mark(TOKEN, 7) + "é".encode() + display_mark(TOKEN, 80) + mark(TOKEN, 1, 5)

    assert_split(stream, ["one\n", DisplayMark(7), "é", DisplayMark(80), CellEnd(1, 5e-06)])


def shown(place: int) -> Display:
    return Display(cell=1, msg_type="display_data", content={}, place=place)


def test_text_waits_for_earlier_displays_and_displays_for_marks():
    ordered = Ordered()
    assert list(ordered.arrived(shown(2))) == []
    assert list(ordered.add(1, "a")) == [(1, "a")]
    assert list(ordered.add(1, DisplayMark(1))) == []
    assert list(ordered.add(2, "b")) == []
    assert list(ordered.add(1, DisplayMark(2))) == []
    assert list(ordered.add(1, CellEnd(1))) == []
    assert list(ordered.arrived(shown(1))) == [(1, shown(1)), (2, "b"), (1, shown(2)), (1, CellEnd(1))]
    assert list(ordered.add(1, "c")) == [(1, "c")]


def test_text_waits_once_for_a_display_with_a_repeated_mark():
    """If an interrupt arrives between the mark and the note that it was written, the mark is written again."""
    ordered = Ordered()
    assert list(ordered.arrived(shown(1))) == []
    assert list(ordered.add(1, DisplayMark(1))) == [(1, shown(1))]
    assert list(ordered.add(1, DisplayMark(1))) == []
    assert list(ordered.add(1, CellEnd(1))) == [(1, CellEnd(1))]
    assert list(ordered.add(1, DisplayMark(2))) == list(ordered.add(1, DisplayMark(2))) == []
    assert list(ordered.arrived(shown(2))) == [(1, shown(2))]
    assert list(ordered.add(1, "text")) == [(1, "text")]


def test_text_of_a_dead_rank_waits_for_no_display():
    ordered = Ordered()
    assert list(ordered.add(1, DisplayMark(1))) == []
    assert list(ordered.add(2, "last words")) == []
    assert list(ordered.give_up()) == [(2, "last words")]
    assert list(ordered.give_up()) == []


def test_a_cell_that_ended_well_says_how_long_it_took():
    stream = b"a" + mark(TOKEN, 1, 0) + b"b" + mark(TOKEN, 20, 1_500_000) + b"c" + mark(TOKEN, 3)

    assert_split(stream, ["a", CellEnd(1, 0.0), "b", CellEnd(20, 1.5), "c", CellEnd(3, None)])


def test_characters_may_be_split():
    text = "aé€𝄞\n"

    assert_split(text.encode() + mark(TOKEN, 7) + text.encode(), [text, CellEnd(7), text])


def test_text_is_not_held_back():
    splitter = TextSplitter(TOKEN)

    assert list(splitter.feed(b"50%")) == ["50%"]
    assert list(splitter.feed(b"\r100%\n")) == ["\r100%\n"]


def test_a_mark_that_is_not_ours_is_text():
    token = TOKEN.encode()
    for other in (
        mark("fedcba9876543210", 5),
        mark(TOKEN[:-1], 5),
        mark(TOKEN + "0", 5),
        b"\x1e" + token + b":\x1e\n",
        b"\x1e" + token + b":12:3\x1e",
        b"\x1e" + token + b":12:3\n",
        b"\x1e" + token + b":x:\x1e\n",
        token + b":5:\x1e\n",
    ):
        assert_split(b"a" + other + b"b" + mark(TOKEN, 5), [f"a{other.decode()}b", CellEnd(5)])


def test_separators_of_the_users_own_are_text():
    assert_split(b"\x1e\x1e" + mark(TOKEN, 1) + b"a\x1eb\n\x1e\n", ["\x1e\x1e", CellEnd(1), "a\x1eb\n\x1e\n"])
    assert_split(b"\x1e0123" + mark(TOKEN, 3), ["\x1e0123", CellEnd(3)])


def test_what_might_be_a_mark_waits_until_it_is_known():
    splitter = TextSplitter(TOKEN)

    assert list(splitter.feed(b"text" + mark(TOKEN, 4)[:-1])) == ["text"]
    assert list(splitter.feed(b"\n")) == [CellEnd(4)]
    assert list(splitter.feed(b"\x1e")) == []
    assert list(splitter.feed(b"no mark")) == ["\x1eno mark"]


def test_bytes_that_are_no_utf8_are_shown_as_such():
    assert_split(b"a\xffb" + mark(TOKEN, 1), ["a�b", CellEnd(1)])


def test_half_a_character_at_the_end_of_a_cell_stays_in_the_cell():
    assert_split(b"caf\xc3" + mark(TOKEN, 1) + b"next" + mark(TOKEN, 2), ["caf�", CellEnd(1), "next", CellEnd(2)])


def test_marks_are_written_in_one_form():
    assert CellEnd(7).encode("ab12") == b"\x1eab12:7:\x1e\n"
    assert CellEnd(7, 0.25).encode("ab12") == b"\x1eab12:7:250000\x1e\n"
    assert DisplayMark(3).encode("ab12") == b"\x1eab12:d3:\x1e\n"


def test_the_last_words_are_those_behind_the_last_cell():
    data = b"one" + mark(TOKEN, 1, 5) + b"two" + mark("ab12", 2) + b"th" + display_mark(TOKEN, 1) + b"ree"
    assert since_last_cell(data) == (b"three", True)
    assert since_last_cell(b"th" + display_mark(TOKEN, 1) + b"ree") == (b"three", False)
    assert since_last_cell(b"\x1e is the user's own") == (b"\x1e is the user's own", False)
