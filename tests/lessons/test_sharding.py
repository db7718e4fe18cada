"""The lessons on tensors in pieces, on real ranks: they show the tensors and the communication of the ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons import lesson_widget
from ddp_notebook.lessons.sharding.mesh_training import WAYS
from ddp_notebook.lessons.sharding.product import PLACEMENTS
from ddp_notebook.session import current

NEEDS = {  # by the placements of A and B: collective that combines A @ B
    ("Replicate()", "Replicate()"): "nothing",
    ("Replicate()", "Shard(0)"): "all_reduce",
    ("Shard(1)", "Replicate()"): "all_reduce",
    ("Shard(1)", "Shard(0)"): "all_reduce",
}
FITS = {("Replicate()", "Shard(1)"), ("Shard(0)", "Replicate()"), *NEEDS}  # no communication is needed to multiply


def plain(lesson: Any) -> dict[str, Any]:
    return json.loads(json.dumps(lesson_widget._plain(lesson.state())))


@pytest.mark.parametrize("of_b", PLACEMENTS)
@pytest.mark.parametrize("of_a", PLACEMENTS)
def test_a_product_is_put_together_of_what_the_ranks_hold(ranks, of_a, of_b):
    product = lessons.product(of_a, of_b)
    assert product.answer is None and [one.name for one in product.held] == ["A", "B"]
    wanted = NEEDS.get((of_a, of_b), "all_gather")
    product.guess(wanted).run()
    state = plain(product)
    assert (state["answer"], state["right"], state["agrees"]) == (wanted, True, True)
    assert bool(product.to_multiply) == ((of_a, of_b) not in FITS)
    result = product.held[2]
    parts = np.zeros((ranks, *result.placement.shape))
    for rank, part in result.placement.parts.items():
        (r, c), (rows, columns) = part.offset, part.size
        parts[rank, r : r + rows, c : c + columns] = result.values[rank]
    together = parts.sum(axis=0) if wanted != "nothing" else parts[0]
    assert (together == product.a @ product.b).all(), "shards lie beside each other, summands add up"
    assert len(state["matrices"]) == 3 and state["whole"] == (product.a @ product.b).tolist()


@pytest.mark.parametrize(("of_a", "of_b", "copies"), [("Replicate()", "Shard(1)", 0), ("Shard(1)", "Shard(0)", 2)])
def test_a_copy_or_summand_on_each_rank_is_drawn_once_per_rank(ranks, of_a, of_b, copies):
    """A replicated matrix in the colours of all ranks would look like a cyclic Shard(1)."""
    product = lessons.product(of_a, of_b).run()
    drawn = [
        [
            (round(bar.get_x(), 3), round(bar.get_y(), 3), bar.get_facecolor())  # type: ignore[attr-defined]
            for bar in axes.patches
            if bar.get_facecolor()[3]  # type: ignore[misc]  # without outlines
        ]
        for axes in product.picture().axes
    ]
    for at, (held, cells) in enumerate(zip(product.held, drawn, strict=True)):
        rows, columns = held.placement.shape
        assert len({(x, y) for x, y, _ in cells}) == len(cells), "no element is drawn over another one"
        assert len(cells) == rows * columns * (ranks if at == copies else 1)
        assert len({colour for *_, colour in cells}) == ranks


def test_a_product_is_driven_by_messages(ranks):
    product = lessons.product()
    product.act({"do": "configure", "options": {"of_a": "Shard(1)", "of_b": "Shard(0)"}})
    assert plain(product)["whole"] is None
    product.act({"do": "run", "guess": "all_gather"})
    state = plain(product)
    assert (state["answer"], state["right"], state["guess"]) == ("all_reduce", False, "all_gather")
    assert state["said"][0].startswith("Not 'all_gather': all_reduce; every rank has a summand")
    assert state["matrices"][2]["partial"] and len(state["matrices"][2]["parts"]) == ranks
    with pytest.raises(UsageError, match=r"placements must be among 'Replicate\(\)', "):
        product.act({"do": "configure", "options": {"of_a": "Shard(2)", "of_b": "Shard(0)"}})
    with pytest.raises(UsageError, match=r"the guess must be one of 'nothing', 'all_gather', 'all_reduce'"):
        product.guess("broadcast")
    assert product.guess(...).guessed == "all_gather"


@pytest.mark.parametrize("way", WAYS)
def test_a_training_on_a_mesh_is_that_of_one_process(ranks, way):
    for rows in [one for one in range(1, ranks + 1) if ranks % one == 0]:
        training = lessons.mesh(rows, way).guess("along the row").run()
        assert training.is_same and training.off is not None and training.off < 1e-12
        moved = training.nbytes()
        assert bool(moved["row"]) == (rows < ranks) and bool(moved["column"]) == (rows > 1)
        columns = ranks // rows
        share = columns if way == "HSDP" else ranks
        assert [one["held"] for one in training.told.values()] == pytest.approx([1 / share] * ranks, abs=0.05)
        assert {rank: one["place"] for rank, one in training.told.items()} == {
            rank: divmod(rank, columns) for rank in range(ranks)
        }
        assert training.mistakes == ()


def test_batches_by_rank_are_told_where_ranks_share_a_matrix(ranks):
    training = lessons.mesh(1, "TP and FSDP", is_by_rank=True).run()
    assert not training.is_same and training.off is not None and training.off > 1e-3
    (mistake,) = training.mistakes
    assert "got different inputs" in mistake and training.said[-1] == f"%ddp_check says: {mistake}"
    training.act({"do": "configure", "options": {"rows": ranks, "way": "TP and FSDP", "is_by_rank": True}})
    training.act({"do": "run", "guess": "along the row"})
    state = plain(training)
    assert state["same"] is True and not any("%ddp_check" in one for one in state["said"]), "no two ranks share one"
    assert (state["right"], state["answer"]) == (False, "down the column")


def test_nothing_in_pieces_is_left_on_the_ranks(ranks):
    """Otherwise the session could not be resized."""
    lessons.product().run()
    lessons.mesh(1).run()
    code = "from ddp_notebook.rank.resize.blockers import ResizeBlockers\nfound = ResizeBlockers(dict(globals()))\n"
    session = current()
    assert session is not None
    session.run(f"{code}said = [*found.sharded, *found.others]\ndel found", quiet=True)
    assert dict(session["said"]) == {rank: [] for rank in range(ranks)}


def test_a_mesh_is_driven_by_messages(ranks):
    training = lessons.mesh(1)
    assert plain(training)["calls"] == [] and plain(training)["run"] is False
    training.act({"do": "run", "guess": "along the row"})
    state = plain(training)
    assert state["right"] is True and state["heights"] == [one for one in range(1, ranks + 1) if ranks % one == 0]
    mine = [one for one in state["calls"] if one["rank"] == 0]
    assert {one["purpose"] for one in mine} == {"all-gather of parameters", "reduce-scatter of gradients"}
    assert all(0 <= one["start"] <= one["end"] for one in mine)
    with pytest.raises(UsageError, match=rf"rows must divide the {ranks} ranks evenly \(1, "):
        training.act({"do": "configure", "options": {"rows": 5, "way": "HSDP"}})
    with pytest.raises(UsageError, match="way must be one of 'HSDP', 'TP and FSDP'"):
        lessons.mesh(way="DDP")
