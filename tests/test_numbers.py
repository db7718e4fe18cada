"""Lines of several ranks that differ only in numbers are merged into one line."""

from __future__ import annotations

import time
import timeit

import pytest

from ddp_notebook.run.output.numbers import form_of, merged


def merge(*lines: str) -> str | None:
    """Return the merged line of ranks 0, 1, ..., or None if the lines differ in more than numbers."""
    forms = [form_of(line) for line in lines]
    if any(form is None or forms[0] is None or form.shape != forms[0].shape for form in forms):
        return None
    return merged(range(len(lines)), [form for form in forms if form is not None])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ("epoch 0 step 4 loss 0.661", "epoch 0 step 4 loss 0.676", "epoch 0 step 4 loss 0.684"),
            "epoch 0 step 4 loss 0.661 | 0.676 | 0.684",
        ),
        (("rank 0: 0.5", "rank 1: 0.5"), "rank 0 | 1: 0.5"),
        (("[rank0] loss 1e-05", "[rank1] loss 2.5E-05"), "[rank0 | 1] loss 1e-05 | 2.5E-05"),
        (("loss nan, -0.5", "loss inf, 0.5"), "loss nan | inf, -0.5 | 0.5"),
        (("tensor([-0.5000])", "tensor([0.5000])"), "tensor([-0.5000 | 0.5000])"),
        (("tensor([ 1., -2.])", "tensor([1., 2.])"), "tensor([ 1., -2. | 2.])"),
        (("loss   9.5 |", "loss  10.5 |"), "loss   9.5 | 10.5 |"),
        (("Wall time: 912 µs", "Wall time: 1.2 ms"), "Wall time: 912 µs | 1.2 ms"),
        (("Wall time: 1.1 ms", "Wall time: 1.2 ms"), "Wall time: 1.1 | 1.2 ms"),
        (("used 1,024 of 2,048 MiB", "used 512 of 2,048 MiB"), "used 1,024 | 512 of 2,048 MiB"),
        (("<function f at 0x7f01aa>", "<function f at 0x7f02bb>"), "<function f at 0x…>"),
        (("f at 0x7f01", "f at 0x7f01"), "f at 0x7f01"),
        (("12:00:01,250 loss 1", "12:00:01,251 loss 2"), "12:00:01,250..12:00:01,251 loss 1 | 2"),
        (("2026-11-28 09:00:01 x", "2026-11-28 09:00:02 x"), "2026-11-28 09:00:01..2026-11-28 09:00:02 x"),
        (("at 12:00:01 x", "at 12:00:02 x"), "at 12:00:01..12:00:02 x"),
        (("cuda:0 ready", "cuda:1 ready"), "cuda:0 | 1 ready"),
        # not merged: parts of words, different text, too many numbers
        (("conv1 ready", "conv2 ready"), None),
        (("0.5", "0.6"), None),
        (("loss 1", "acc 1"), None),
        (("a 1 2", "a 1"), None),
        (("a 1\nb 2", "a 2\nb 2"), None),
        (("x [1, 2, 3, 4, 5]", "x [6, 7, 8, 9, 0]"), None),
        (("tensor([0.7, 0.8])", "tensor([0.1, 0.2])"), None),
        (("array([0.7 0.8])", "array([0.1 0.2])"), None),
        (("shape (4, 2) and (1, 3)", "shape (5, 2) and (1, 4)"), "shape (4 | 5, 2) and (1, 3 | 4)"),
        (("split(1, 2) 3", "split(1, 3) 4"), "split(1, 2 | 3) 3 | 4"),
        (("10.0.0.1 up", "10.0.0.2 up"), None),
        (("10.1.0.1 up", "10.2.0.1 up"), None),
        (("torch 2.1.0", "torch 2.2.0"), None),
        (("part 1-3 done", "part 2-3 done"), None),
        (("on 2024-01-15 ok", "on 2024-01-16 ok"), "on 2024-01-15..2024-01-16 ok"),
        (("2024-01-15T10:00:01Z x", "2024-01-15T10:00:02Z x"), "2024-01-15T10:00:01Z..2024-01-15T10:00:02Z x"),
        (("shape=1,200", "shape=1,201"), "shape=1,200 | 1,201"),
        (("n=0 big=10,000,000", "n=1 big=20,000,000"), "n=0 | 1 big=10,000,000 | 20,000,000"),
        (("epoch 1 (10,000 samples)", "epoch 1 (20,000 samples)"), "epoch 1 (10,000 | 20,000 samples)"),
        (("sizes [100,200,300]", "sizes [101,200,300]"), "sizes [100,200,300 | 101,200,300]"),
        (("pair 10,000,0.5", "pair 10,000,0.6"), "pair 10,000,0.5 | 0.6"),
        (("n=9,000", "n=10,000"), "n=9,000 | 10,000"),
        (("1,200 rows", "-1,201 rows"), "1,200 | -1,201 rows"),
        (("loss 0.5.", "loss 0.6."), "loss 0.5 | 0.6."),
    ],
)
def test_lines_of_ranks_are_merged(lines, expected):
    assert merge(*lines) == expected


def test_more_than_eight_ranks_are_merged_as_min_mean_and_max():
    eight = merge(*(f"rank {rank} loss 0.{rank}" for rank in range(8)))
    assert eight is not None and eight.count("|") == 14
    ten = [f"rank {rank} loss {rank / 10:.2f} in {rank + 1} ms" for rank in range(10)]
    assert merge(*ten) == "rank 0-9 loss min 0.00 mean 0.45 max 0.90 in min 1 ms mean 5.5 ms max 10 ms"
    ten[3] = "rank 3 loss nan in 4 ms"
    assert "loss min 0.00 mean 0.47 max 0.90, nan on 1 rank in" in (merge(*ten) or "")
    units = [f"wall {rank} µs" if rank < 5 else f"wall {rank} ms" for rank in range(1, 11)]
    assert merge(*units) == "wall min 1 µs mean 4.501 ms max 10 ms"
    assert merge(*["same 1"] * 10) == "same 1"
    assert merge(*(f"shape=1,20{rank}" for rank in range(9))) == "shape=min 1,200 mean 1,204 max 1,208"
    assert merge(*(f"sizes [1,20{rank}]" for rank in range(9))) is None, "they may be two numbers"


def test_the_mean_of_integers_has_all_digits():
    counts = [1_234_567 + 1000 * rank for rank in range(9)]
    assert merge(*(f"samples {n}" for n in counts)) == "samples min 1234567 mean 1238567 max 1242567"
    assert merge(*(f"{n:,} samples" for n in counts)) == "min 1,234,567 mean 1,238,567 max 1,242,567 samples"
    counts[0] += 3
    assert merge(*(f"samples {n}" for n in counts)) == "samples min 1234570 mean 1238567.3 max 1242567"
    assert merge(*(f"in {1024 + rank} MB" for rank in range(9))) == "in min 1024 MB mean 1028 MB max 1032 MB"
    assert merge(*(f"x {rank}e3" for rank in range(9))) == "x min 0e3 mean 4000 max 8e3"


def test_a_marker_is_equal_for_lines_of_one_step():
    def marker(line: str) -> str:
        form = form_of(line)
        assert form is not None
        return form.marker

    assert marker("rank 0 step 4 loss 0.5") == marker("rank 1 step 4 loss 0.25")
    assert marker("step 4 loss 0.5") != marker("step 5 loss 0.5")
    assert marker("step 1,200 loss 0.5") != marker("step 1,201 loss 0.5")
    assert marker("step 4 took 12 ms") == marker("step 4 took 1 s")
    assert marker("step 4 min 0.5") != marker("step 5 min 0.5")
    assert marker("step 4 min: -0.5") != marker("step 5 min: -0.5")
    assert marker("step 4 took 2 min 30 s") == marker("step 4 took 3 min 10 s")


def test_a_line_of_spaces_takes_time_in_proportion_to_its_length():
    """With quadratic time the ratio would be about 60."""

    def least_s(count: int) -> float:
        line = (" " * count + "a") * (900 // (count + 1))
        return min(timeit.repeat(lambda: form_of(line), timer=time.process_time, number=5, repeat=5))

    assert form_of(" " * 899 + "a") is None
    assert least_s(899) < 8 * least_s(15)
