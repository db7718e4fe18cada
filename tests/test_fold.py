"""Merged lines of several ranks."""

from __future__ import annotations

import random

import pytest

from ddp_notebook.messages.ranks import Display
from ddp_notebook.run.output.fold import Fold, Folded, Item, Tail

# The README documents these values. They are not imported, so that a test fails if the code has others.
TWINS_S, OTHERS_S = 0.05, 0.5


def line(text: str) -> Item:
    return Item.line("stdout", text)


def folded(*texts: str) -> list[tuple[str, str]]:
    """Return the result of one string of lines (a character each) per rank, all at once: `(ranks, line)`."""
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
        (("ab", "ba"), "0a 01b 1a"),  # crossed: one of them has to come first
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


def test_a_value_is_not_merged_with_a_printed_line():
    fold = Fold()
    fold.add(0, Item.line("stdout", "0"), now=0.0)
    fold.add(0, Item.value("1"), now=0.0)
    fold.add(1, Item.line("stdout", "1"), now=0.0)
    fold.add(1, Item.value("2"), now=0.0)
    shown = [(one.ranks, one.item.text) for one in fold.take_all()]
    assert shown == [([0], "0"), ([1], "1"), ([0], "1"), ([1], "2")]


def test_values_of_a_cell_stand_in_the_order_of_the_ranks():
    """Also if the first rank is late, unless it is very late."""
    fold = Fold()
    value = Display(cell=1, msg_type="execute_result", content={"data": {"text/plain": "1"}}, place=1)
    fold.add(1, Item.value("1"), now=0.0)
    fold.add(1, Item.displayed(1, value), now=0.0)
    assert fold.take(now=OTHERS_S - 0.1, talking={0, 1}) == []
    assert fold.wait_s(OTHERS_S - 0.1) == pytest.approx(0.1)
    fold.add(0, Item.value("0"), now=OTHERS_S - 0.1)
    assert [(entry.ranks, entry.item.text) for entry in fold.take_all()] == [([0], "0"), ([1], "1"), ([1], "")]

    fold.add(1, Item.value("1"), now=0.0)
    fold.add(0, Item.value("0"), now=OTHERS_S / 2)
    assert fold.take(now=OTHERS_S - 0.1, talking={2}) == []
    assert [entry.ranks for entry in fold.take(now=OTHERS_S, talking={2})] == [[0], [1]], "while rank 2 computes"

    fold.add(1, Item.value("1"), now=0.0)
    assert [entry.ranks for entry in fold.take(now=OTHERS_S, talking={0, 1})] == [[1]]


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
    assert fold.take(0.0, {1}, tail.join) == [] and tail.entries[1].ranks == [0, 1, 2] and tail.changed
    fold.add(1, line("a"), 0.0)  # after its "b": not the shown line
    assert fold.take(0.0, {1}, tail.join) == [Folded(line("a"), [1])]
    fold.add(2, line("b"), 0.0)  # it has printed this already
    assert fold.take(0.0, {2}, tail.join) == [Folded(line("b"), [2])]


def test_no_line_joins_the_tail_after_a_new_line():
    tail = Tail()
    tail.extend([Folded(line("a"), [0])])
    fold = Fold()
    fold.add(0, line("new"), 0.0)
    fold.add(1, line("x"), 0.0)
    fold.add(1, line("a"), 0.0)
    assert [(entry.ranks, entry.item.text) for entry in fold.take(1.0, {0, 1}, tail.join)] == [
        ([0], "new"),
        ([1], "x"),
        ([1], "a"),
    ]
    assert not tail.changed


def test_late_lines_are_put_in_the_order_of_ranks():
    tail = Tail()
    tail.extend([Folded(line("c"), [2]), Folded(line("d"), [2])])
    assert tail.insert(Folded(line("a"), [0])) and tail.insert(Folded(line("e"), [3]))
    assert tail.insert(Folded(line("b"), [0])) and tail.insert(Folded(line("f"), [1]))
    assert not tail.insert(Folded(line("x"), [2])), "it comes after what is shown"
    assert [(entry.ranks, entry.item.text) for entry in tail.entries] == [
        ([0], "a"), ([0], "b"), ([1], "f"), ([2], "c"), ([2], "d"), ([3], "e")
    ]  # fmt: skip
    assert tail.join(1, line("e")) and tail.entries[-1].ranks == [1, 3]


def test_late_lines_stand_next_to_the_same_lines_of_other_ranks():
    tail = Tail()
    texts = ["first [{}, 7]", "tensor([{}.5])", "tensor([{}.7])", "end {}"]
    tail.extend([Folded(line(text.format(1)), [1]) for text in texts])
    for rank in (2, 0, 3):
        for text in texts:
            assert tail.insert(Folded(line(text.format(rank)), [rank]))
    shown = [(entry.ranks[0], entry.item.text) for entry in tail.entries]
    assert shown == [(rank, text.format(rank)) for text in texts for rank in range(4)]


def shown(fold: Fold, now: float, talking: set[int]) -> list[tuple[str, str]]:
    return [("".join(map(str, entry.ranks)), entry.item.text) for entry in fold.take(now, talking)]


def test_lines_that_differ_only_in_numbers_are_one():
    fold = Fold()
    for step in range(32):
        for rank in range(4):
            fold.add(rank, line(f"epoch 0 step {step} loss {(rank + step) / 10:.1f}"), 0.0)
    assert shown(fold, 0.0, {0, 1, 2, 3}) == [
        ("0123", "epoch 0 step {} loss {:.1f} | {:.1f} | {:.1f} | {:.1f}".format(k, *((k + r) / 10 for r in range(4))))
        for k in range(32)
    ]
    for rank in range(2):
        fold.add(rank, line(str(rank)), 0.0)
    assert [text for _, text in shown(fold, 0.1, {0, 1})] == ["0", "1"], "bare numbers may mean anything"
    for rank in range(2):
        fold.add(rank, line(f"loss {rank}" if rank else "loss 0 1"), 1.0)
    assert len(shown(fold, 2.0, {0, 1})) == 2, "as many numbers"


def test_a_line_with_numbers_is_held_for_the_other_ranks():
    fold = Fold()
    fold.add(0, line("loss 0.1"), 0.0)
    fold.add(1, line("loss 0.2"), 0.3)
    assert shown(fold, OTHERS_S - 0.01, {0, 1, 2}) == []
    assert fold.wait_s(OTHERS_S - 0.01) == pytest.approx(0.01)
    assert shown(fold, OTHERS_S, {0, 1, 2}) == [("01", "loss 0.1 | 0.2")]
    fold.add(0, line("loss 0.3"), 0.6)
    fold.add(2, line("loss 0.4"), 0.7)  # its first line: not of the same step as the second line of the others
    fold.add(1, line("loss 0.5"), 0.7)
    assert shown(fold, 0.7, {0, 1, 2}) == [("2", "loss 0.4")]
    fold.add(2, line("loss 0.6"), 0.8)
    assert shown(fold, 0.8, {0, 1, 2}) == [("012", "loss 0.3 | 0.5 | 0.6")]


def test_lines_of_one_rank_wait_once():
    fold = Fold()
    fold.add(0, line("loss 1"), 0.0)
    assert shown(fold, OTHERS_S, {0, 1}) == [("0", "loss 1")]
    fold.add(0, line("loss 2"), 10.0)
    assert shown(fold, 10.0 + TWINS_S, {0, 1}) == [("0", "loss 2")]
    fold.add(1, line("loss 3"), 20.0)
    assert shown(fold, 20.0 + TWINS_S, {0, 1}) == [], "they come from other ranks too"


def test_lines_of_one_step_are_merged_if_a_rank_has_more_lines():
    fold = Fold()
    for rank, steps in ((0, range(6)), (1, range(3, 6))):
        for step in steps:
            fold.add(rank, line(f"step {step} loss {rank}.5"), 0.0)
    assert shown(fold, OTHERS_S, {0, 1}) == [
        ("0", "step 0 loss 0.5"), ("0", "step 1 loss 0.5"), ("0", "step 2 loss 0.5"),
        ("01", "step 3 loss 0.5 | 1.5"), ("01", "step 4 loss 0.5 | 1.5"), ("01", "step 5 loss 0.5 | 1.5"),
    ]  # fmt: skip


@pytest.mark.slow
def test_every_number_of_every_rank_is_there():
    """For random programs of up to four ranks, the lines of each rank can be reconstructed from the shown lines."""
    chance = random.Random(2)
    for _ in range(300):
        fold = Fold()
        now, lines = 0.0, []
        ranks = range(chance.randrange(1, 5))
        came: list[tuple[str, str]] = []
        for _ in range(chance.randrange(40)):
            now += chance.choice((0.0, 0.01, 0.2, 1.0))
            rank = chance.choice(ranks)
            text = chance.choice(("a {}", "b {} c {}", "word", "{}")).format(chance.randrange(3), chance.random())
            lines.append((rank, text))
            fold.add(rank, line(text), now)
            came += shown(fold, now, set(ranks))
        came += [("".join(map(str, entry.ranks)), entry.item.text) for entry in fold.take_all()]
        for rank in ranks:
            assert [_of_rank(text, its, rank) for its, text in came if str(rank) in its] == [
                text for its, text in lines if its == rank
            ]


def _of_rank(text: str, ranks: str, rank: int) -> str:
    """Return the line of one rank from a merged line."""
    words = text.replace(" | ", "|").split(" ")
    return " ".join(word.split("|")[ranks.index(str(rank))] if "|" in word else word for word in words)


def test_nothing_is_folded_where_that_is_off():
    fold = Fold(folds=False)
    for rank in (1, 0):
        for text in ("same", "loss 1"):
            fold.add(rank, line(text), 0.0)
    assert shown(fold, 0.0, {0, 1}) == [("0", "same"), ("1", "same"), ("0", "loss 1"), ("1", "loss 1")]


def test_displays_of_all_ranks_are_shown_in_the_order_of_ranks():
    def display(rank: int) -> Item:
        content = {"data": {"image/png": f"picture {rank}"}, "metadata": {}, "transient": {}}
        return Item.displayed(rank, Display(cell=1, msg_type="display_data", content=content, place=1))

    fold = Fold()
    for rank in (2, 3, 0):
        fold.add(rank, display(rank), 0.0)
    assert fold.take(OTHERS_S - 0.1, {0, 1, 2, 3}) == []
    fold.add(1, display(1), OTHERS_S - 0.1)
    assert [entry.ranks for entry in fold.take(OTHERS_S - 0.1, {0, 1, 2, 3})] == [[0], [1], [2], [3]]
