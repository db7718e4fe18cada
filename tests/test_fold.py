"""Lines of several ranks, folded."""

from __future__ import annotations

import random

import pytest

from ddp_notebook.run.output.fold import TWINS_S, VALUES_S, Fold, Folded, Item, Tail, waits_s
from ddp_notebook.wire.events import Display


def line(text: str) -> Item:
    return Item.line("stdout", text)


def folded(*texts: str) -> list[tuple[str, str]]:
    """What comes of one string of lines (a character each) per rank, all at once: `(ranks, line)`."""
    fold = Fold()
    for rank, text in enumerate(texts):
        for character in text:
            fold.add(rank, line(character), 0.0)
    return [("".join(map(str, entry.ranks)), entry.item.text) for entry in fold.take_all()]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("a", "a", "a"), "012a"),
        (("ab", "ab"), "01a 01b"),
        (("a", "b"), "0a 1b"),
        (("axb", "ayb"), "01a 0x 1y 01b"),
        (("axxb", "ab"), "01a 0x 0x 01b"),
        (("b", "axb"), "1a 1x 01b"),
        (("ab", "ba"), "0a 01b 1a"),  # crossed: one of them has to go first
        (("aa", "a"), "01a 0a"),
        (("", "a"), "1a"),
        ((), ""),
    ],
)
def test_lines_are_aligned_as_a_person_would(texts, expected):
    assert " ".join(ranks + text for ranks, text in folded(*texts)) == expected


def test_every_line_of_every_rank_is_there_in_its_order():
    chance = random.Random(1)
    for _ in range(300):
        texts = ["".join(chance.choices("abc", k=chance.randrange(12))) for _ in range(chance.randrange(1, 6))]
        came = folded(*texts)
        for rank, text in enumerate(texts):
            assert "".join(one for ranks, one in came if str(rank) in ranks) == text


def test_a_line_waits_for_its_twins_and_not_for_ever():
    fold = Fold()
    fold.add(0, line("a"), now=0.0)
    assert fold.take(now=TWINS_S / 2, talking={0, 1}) == []
    assert fold.wait_s(TWINS_S / 2) == pytest.approx(TWINS_S / 2)
    assert fold.take(now=TWINS_S, talking={0, 1}) == [Folded(line("a"), [0])]
    assert fold.wait_s(1.0) is None and not fold

    fold.add(0, line("a"), now=0.0)
    assert fold.take(now=0.0, talking={0}) == [Folded(line("a"), [0])], "nobody else can have it"
    fold.add(0, line("a"), now=0.0)
    fold.add(1, line("a"), now=0.0)
    assert fold.take(now=0.0, talking={0, 1}) == [Folded(line("a"), [0, 1])], "all have it"


def test_values_of_a_cell_stand_in_the_order_of_the_ranks():
    """Also where the first rank is late, unless it is very late."""
    fold = Fold()
    value = Display(cell=1, msg_type="execute_result", content={"data": {"text/plain": "1"}}, place=1)
    fold.add(1, Item.line("stdout", "1", waits_s(value)), now=0.0)
    fold.add(1, Item.displayed(1, value), now=0.0)
    assert fold.take(now=VALUES_S - 0.1, talking={0, 1}) == []
    assert fold.wait_s(VALUES_S - 0.1) == pytest.approx(0.1)
    fold.add(0, Item.line("stdout", "0", waits_s(value)), now=VALUES_S - 0.1)
    assert [entry.ranks for entry in fold.take_all()] == [[0], [1], [1]]

    fold.add(1, Item.line("stdout", "1", waits_s(value)), now=0.0)
    fold.add(0, Item.line("stdout", "0", waits_s(value)), now=VALUES_S / 2)
    assert fold.take(now=VALUES_S - 0.1, talking={2}) == []
    assert [entry.ranks for entry in fold.take(now=VALUES_S, talking={2})] == [[0], [1]], "while rank 2 computes"

    fold.add(1, Item.line("stdout", "1", waits_s(value)), now=0.0)
    assert [entry.ranks for entry in fold.take(now=VALUES_S, talking={0, 1})] == [[1]]


def test_streams_are_not_mixed():
    fold = Fold()
    fold.add(0, Item.line("stdout", "a"), 0.0)
    fold.add(1, Item.line("stderr", "a"), 0.0)
    assert [entry.ranks for entry in fold.take_all()] == [[0], [1]]


def test_equal_displays_fold_but_not_those_with_a_handle():
    def display(handle: str | None = None) -> Display:
        content = {"data": {"text/html": "<b>x</b>", "text/plain": "x"}, "metadata": {}, "transient": {}}
        if handle:
            content["transient"] = {"display_id": handle}
        return Display(cell=1, msg_type="display_data", content=content, place=1)

    for handle, expected in ((None, [[0, 1]]), ("h", [[0], [1]])):
        fold = Fold()
        for rank in (0, 1):
            fold.add(rank, Item.displayed(rank, display(handle)), 0.0)
        assert [entry.ranks for entry in fold.take_all()] == expected


def test_late_twins_join_what_was_shown_last():
    tail = Tail()
    tail.extend([Folded(line("a"), [0]), Folded(line("b"), [0, 2])])
    fold = Fold()
    fold.add(1, line("b"), 0.0)
    assert fold.take(0.0, {1}, tail) == [] and tail.entries[1].ranks == [0, 1, 2] and tail.changed
    fold.add(1, line("a"), 0.0)  # after its "b": not the one that was shown
    assert fold.take(0.0, {1}, tail) == [Folded(line("a"), [1])]
    fold.add(2, line("b"), 0.0)  # it has said that already
    assert fold.take(0.0, {2}, tail) == [Folded(line("b"), [2])]


def test_nothing_joins_the_tail_once_something_new_is_to_be_shown():
    tail = Tail()
    tail.extend([Folded(line("a"), [0])])
    fold = Fold()
    fold.add(0, line("new"), 0.0)
    fold.add(1, line("x"), 0.0)
    fold.add(1, line("a"), 0.0)
    assert [(entry.ranks, entry.item.text) for entry in fold.take(1.0, {0, 1}, tail)] == [
        ([0], "new"),
        ([1], "x"),
        ([1], "a"),
    ]
    assert not tail.changed
