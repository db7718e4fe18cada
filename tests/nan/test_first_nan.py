"""The first NaN or infinite value of a run, from recorded rows."""

import math

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.observe.files import load
from ddp_notebook.observe.nan.first_nan import cell_of_prompt
from tests.nan.rows import MODEL, from_on, recorded

NAN, INF = math.nan, math.inf


def losses_from(step: int, rank: int, value: float = NAN) -> dict[tuple[int, int], float]:
    """Return losses that are bad on one rank from a step on, and on the other one from the next step on."""
    return {(one, of): value for of in (0, 1) for one in range(step + (of != rank), 10)}


def test_the_answer_names_rank_step_and_bucket():
    found = recorded(nan={(6, 1): [1, 2], **from_on(7, 2)}, losses=losses_from(6, 1)).first_nan()

    assert found.sentence == (
        "cell 1: loss was NaN first on rank 1 at step 6, on rank 0 at 7; in step 6 rank 1 sent NaN into bucket 1 of "
        f"{MODEL} (b.weight) before the average; step 5 was clean"
    )
    assert (found.is_found, found.is_exact, found.step, found.last_clean_step, found.ranks) == (True, True, 6, 5, (1,))
    assert [(one.rank, one.bucket, one.nans, one.parameters) for one in found.gradients] == [
        (1, 1, 5, ("b.weight",)),
        (1, 2, 5, ("a.weight",)),
    ]
    assert "1 was averaged earlier in this step and finite; 1 more was not finite" in found.details[0]
    assert any("%ddp_nan --catch" in line for line in found.details)


def test_nan_and_infinite_values_are_told_apart():
    run = recorded(infinite={(6, 1): [0], **from_on(7, 2)})
    assert "rank 1 sent infinite values into bucket 0" in run.first_nan().sentence
    run = recorded(infinite={(6, 1): [0], **from_on(7, 2)}, nan={(6, 1): [0]}, losses=losses_from(6, 1, INF))
    assert "loss was infinite first on rank 1 at step 6" in run.first_nan().sentence
    assert "rank 1 sent NaN and infinite values into bucket 0" in run.first_nan().sentence


def test_sampled_values_give_an_interval_and_what_to_record():
    found = recorded(nan=from_on(5, 2), left_out=[5, 6, 7]).first_nan()

    assert found.is_found and not found.is_exact
    assert "in step 8, the first bad one that was recorded, all 2 ranks sent NaN" in found.sentence
    assert found.sentence.endswith("step 4 was clean")
    assert any("anywhere from step 5 to step 8" in line and "%ddp_record all" in line for line in found.details)


def test_a_finite_rank_makes_a_sampled_step_exact():
    # The weights were finite, so it did not begin in an earlier step.
    found = recorded(nan={(8, 1): [0], **from_on(9, 2)}, left_out=[5, 6, 7]).first_nan()
    assert "in step 8 rank 1 sent NaN" in found.sentence
    assert not any("anywhere" in line for line in found.details)


def test_a_loss_fills_the_gap_between_recorded_gradients():
    found = recorded(nan=from_on(6, 2), left_out=[5, 6, 7], losses=losses_from(5, 0)).first_nan()
    assert found.sentence.startswith("cell 1: loss was NaN first on rank 0 at step 5, on rank 1 at 6; in step 8,")


def test_all_ranks_at_once():
    assert "in step 3 all 4 ranks sent NaN" in recorded(4, nan=from_on(3, 4)).first_nan().sentence


@pytest.mark.parametrize("which", ["nan", "infinite"])
def test_a_run_that_recovers_has_no_finding(which):
    bad = {(2, 0): [1]}
    found = (recorded(nan=bad) if which == "nan" else recorded(infinite=bad)).first_nan()
    assert not found.is_found and "all recorded gradients were finite up to step 9" in found.sentence
    assert any("in step 2 gradients were not finite, first on rank 0 in bucket 1" in line for line in found.details)


def test_a_skipped_last_step_has_no_finding():
    # A GradScaler skips the optimizer step, so the next backward has the same step number.
    found = recorded(infinite={(9, 0): [1]}, repeated=[9]).first_nan()
    assert not found.is_found
    assert any("the program skipped or repaired them" in line for line in found.details)


def test_a_right_run_reports_what_was_looked_at():
    found = recorded(losses={}).first_nan()
    assert not found.is_found and found.sentence == "cell 1: all that was recorded is finite"
    assert found.details == (
        "looked at: 60 gradient buckets in 10 of 10 steps on ranks 0,1; the logged loss. Steps are counted from 0",
    )


@pytest.mark.parametrize("best", [INF, -INF, NAN])
def test_a_metric_that_was_never_finite_is_no_finding(best):
    found = recorded(losses={}, best=best).first_nan()
    assert not found.is_found and "all recorded gradients were finite" in found.sentence
    assert any(line.startswith("best was ") for line in found.details)
    # It does not become the answer of a run with NaN either.
    found = recorded(nan={(6, 1): [0], **from_on(7, 2)}, losses=losses_from(6, 1), best=best).first_nan()
    assert found.sentence.startswith("cell 1: loss was NaN first on rank 1 at step 6")


def test_without_gradients_the_loss_is_the_answer():
    found = recorded(left_out=range(10), losses=losses_from(4, 1)).first_nan()
    assert found.is_found and found.sentence == "cell 1: loss was NaN first on rank 1 at step 4, on rank 0 at 5"
    assert any("the gradients were not recorded" in line for line in found.details)
    found = recorded(left_out=range(10), losses={(4, 1): NAN}).first_nan()
    assert not found.is_found and found.sentence == "cell 1: all logged numbers are finite; no gradient was recorded"


def test_nan_weights_lead_to_the_earlier_cell():
    run = recorded(nan=from_on(0, 2), cell=2, into=recorded(nan={(6, 1): [0], **from_on(7, 2)}, cell=1))
    found = run.first_nan()
    assert found.cell == 2 and "in step 0, the first bad one that was recorded, all 2 ranks" in found.sentence
    assert any("the gradients at the end of cell 1 were not finite either: %ddp_nan 1" in one for one in found.details)
    assert run.first_nan(1).ranks == (1,)


@pytest.mark.parametrize(
    ("origin", "place"), [("fsdp", "reduce_scatter_single of layers.1"), ("user", "all_reduce at cell line 7")]
)
def test_gradients_without_ddp(origin, place):
    found = recorded(nan={(6, 1): [0, 1, 2], **from_on(7, 2)}, origin=origin).first_nan()
    assert f"in step 6 rank 1 sent NaN into {place} before the average; step 5 was clean" in found.sentence


def test_equal_shapes_that_the_user_averages_are_told_apart():
    # Only the first of three gradients of one shape is bad, and the later ones do not replace it.
    found = recorded(nan={(6, 1): [0], **from_on(7, 2)}, origin="user").first_nan()
    assert (found.step, found.ranks, found.last_clean_step) == (6, (1,), 5)
    # A second backward in the same step does.
    found = recorded(infinite={(6, 1): [0]}, repeated=[6], origin="user").first_nan()
    assert not found.is_found and any("the program skipped or repaired them" in line for line in found.details)


def test_a_loaded_recording_gives_the_same_answer(tmp_path):
    run = recorded(nan={(6, 1): [1], **from_on(7, 2)}, losses=losses_from(6, 1))
    assert str(load(run.save(tmp_path / "run.npz")).first_nan()) == str(run.first_nan())


def test_wrong_cells():
    with pytest.raises(UsageError, match=r"^cell 7 has no recorded training step .*; cells with them: 1$"):
        recorded().first_nan(7)
    with pytest.raises(UsageError, match="no training step and no logged number was recorded"):
        recorded(steps=0).first_nan()


def test_a_cell_is_found_by_its_prompt():
    both = recorded(nan=from_on(3, 2), cell=2)
    both = recorded(nan=from_on(0, 2), cell=11, into=both)
    both.prompts |= {2: "In [3]", 11: "In [7]"}
    assert (cell_of_prompt(both, 3), cell_of_prompt(both, 7)) == (2, 11)
    with pytest.raises(UsageError, match=r"In \[2\] has no recorded training step .*: In \[3\], In \[7\]$"):
        cell_of_prompt(both, 2)
    assert any("%ddp_nan 3" in one for one in both.first_nan(11).details)
    for cell in range(12, 24):
        both = recorded(nan=from_on(0, 2), cell=cell, into=both)
    with pytest.raises(UsageError, match=r"cells with them: In \[3\], In \[7\], cell 12, .*, cell 23$"):
        cell_of_prompt(both, 2)
    with pytest.raises(UsageError, match=r"cells with them: 2 \(In \[3\]\), 11 \(In \[7\]\), 12, .*, 23$"):
        both.first_nan(99)
    both.prompts[11] = "In [3], second run"
    assert cell_of_prompt(both, 3) == 11
