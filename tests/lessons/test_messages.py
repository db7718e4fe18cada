"""Recorded point-to-point communication, and the cost of algorithms, on two and more real ranks."""

from __future__ import annotations

import numpy as np
import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.algorithms import plans
from ddp_notebook.lessons.collectives.costs import fit
from ddp_notebook.lessons.lesson_widget import _plain
from ddp_notebook.lessons.messages.message_scenes import STORIES


def blocked(scene: lessons.Scene, rank: int) -> float:
    return sum(event.blocked_ms for event in scene.events if event.rank == rank)


def test_a_send_waits_for_its_receiver(ranks):
    scene = lessons.point_to_point("blocking")
    start_ms = {event.what: event.start_ms for event in scene.events}
    assert start_ms["recv"] - start_ms["work"] > 250 and start_ms["send"] < start_ms["recv"], scene.events
    assert blocked(scene, 0) == pytest.approx(start_ms["recv"] - start_ms["send"], abs=100), scene.events
    assert blocked(scene, 1) < 100
    assert scene.values[1] == [0.0] * 4
    assert [(scene.events[a].what, scene.events[b].what) for a, b in scene.arrows] == [("send", "recv")]
    assert f"rank 0 waited {blocked(scene, 0):.0f} ms for rank 1" in scene.waits


def test_isend_and_irecv_let_the_ranks_work_meanwhile(ranks):
    scene = lessons.point_to_point("nonblocking")
    assert {event.what for event in scene.events} == {"isend", "irecv", "work"}
    assert blocked(scene, 0) + blocked(scene, 1) < 100, scene.events
    assert scene.values[1] == [0.0] * 4


def test_what_is_written_before_wait_is_sent(ranks):
    """The receiver is late, so exactly the half that was written too early has changed.

    On a busy machine the sender may be even later, and its message is sent at once. The scene reports this and is
    repeated.
    """
    none, race = lessons.point_to_point("no race"), lessons.point_to_point("race")
    for _ in range(4):
        if "rank 1 waited" not in race.said:
            break
        race = lessons.point_to_point("race")
    assert race.changed == 0.5 and none.changed == 0.0
    assert set(race.values[1][:128]) == {1.0} and set(race.values[1][128:]) == {2.0}
    assert "rank 1 has 50% of the numbers as they were at isend, 50% changed" in race.said


def test_recv_from_any_source_takes_who_comes_first(ranks):
    scene = lessons.point_to_point("any source")
    assert scene.values[0] == list(range(ranks - 1, 0, -1))
    senders = [scene.events[sent].rank for sent, _ in scene.arrows]
    assert senders == scene.values[0]


def test_tags_tell_messages_apart(ranks):
    scene = lessons.point_to_point("tags")
    assert scene.values[1] == [(2, 2.0), (1, 1.0)]
    assert [(scene.events[a].tag, scene.events[b].tag) for a, b in scene.arrows] == [(2, 2), (1, 1)]


def test_a_deadlock_is_freed_and_the_group_is_usable(ranks):
    scene = lessons.point_to_point("deadlock")
    assert "rank 0: waiting in send" in scene.error and "rank 1: waiting in send" in scene.error
    assert [event.is_over for event in scene.events if event.rank < 2] == [False, False]
    assert "rank 0 waited for rank 1 in send until it was stopped" in scene.said
    assert scene.seconds < 6
    assert scene.play("blocking").values[1] == [0.0] * 4


def test_there_is_a_picture_and_a_state_of_every_scene(ranks):
    scene = lessons.point_to_point("tags")
    for name in ("tags", "race"):
        scene.play(name)
        assert scene.picture().get_suptitle().startswith(STORIES[name].title)
        assert _plain(scene.state())["name"] == name
    with pytest.raises(UsageError, match=r"^the scene must be one of blocking, nonblocking, race,"):
        lessons.point_to_point("love")


def test_costs_are_measured_fitted_and_counted(ranks):
    sizes = [ranks * 4_000, ranks * 400_000]
    costs = lessons.cost(sizes=sizes, repeats=2)
    assert lessons.cost(sizes=sizes[:1], algorithms=["ring all_reduce"], repeats=1).sizes == sizes[:1]

    assert costs.algorithms == [
        "ring all_reduce",
        "tree all_reduce",
        "halving and doubling",
        "parameter server",
        "naive all_reduce",
        "all_reduce",
    ]
    assert all(seconds > 0 for seconds in costs.times.values())
    n = sizes[-1]
    assert set(costs.through["ring all_reduce"].values()) == {4 * (ranks - 1) * n // ranks}
    server = costs.through["parameter server"]
    assert server[0] == 2 * (ranks - 1) * n and {server[rank] for rank in range(1, ranks)} == {2 * n}
    for name in costs.algorithms:
        one = costs.fit[name]
        assert one.alpha_s >= 0 and one.beta_s_per_byte >= 0 and one.alpha_s + one.beta_s_per_byte > 0
    assert "parameter server" in costs._repr_html_()
    assert costs.plot().axes[0].get_ylabel() == "time (ms)"


def test_a_simulated_link_takes_its_time(ranks):
    """A rank sleeps at least as long as its link needs, so on any machine a time is at least that of the model."""
    costs = lessons.cost(sizes=[ranks * 4_000, ranks * 100_000], repeats=1, link_mb_s=20, link_ms=1)
    assert "all_reduce" not in costs.algorithms
    assert tuple(costs.link or ()) == (1, 20)
    for name in costs.algorithms:
        for nbytes, seconds in costs.of(name).items():
            # Halving and doubling on three ranks needs less than the model says, which has the busiest rank.
            least = plans.cost("ring all_reduce" if name == "halving and doubling" else name, ranks, nbytes).nbytes
            assert seconds > 0.95 * (least / 20e6), (name, nbytes)
    assert "links of 20 MB/s and 1 ms a message" in costs.plot().get_suptitle()
    with pytest.raises(UsageError, match="link_mb_s must be greater than 0 and link_ms at least 0, got 0 and"):
        lessons.cost(link_mb_s=0)


@pytest.mark.parametrize("name", plans.REDUCES)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_the_fit_finds_the_alpha_and_beta_of_the_times(name, world_size):
    alpha, beta = 50e-6, 0.5e-9
    times = {}
    for nbytes in (1_000, 100_000, 10_000_000):
        of = plans.cost(name, world_size, nbytes)
        times[nbytes] = of.messages * alpha + of.nbytes * beta
    found = fit(name, world_size, times)
    assert np.allclose([found.alpha_s, found.beta_s_per_byte], [alpha, beta], rtol=1e-6)
    assert found.error < 1e-6


@pytest.mark.parametrize("name", plans.ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_the_models_bytes_are_those_through_the_busiest_rank(name, world_size):
    """For the parameter server both directions count, because gathering and broadcasting are sequential."""
    n = 840 * world_size
    links = plans.moved(name, [840] * world_size)
    out = [sum(nbytes for (src, _), nbytes in links.items() if src == rank) for rank in range(world_size)]
    busiest = max(plans.through_ranks(links).values()) if name == "parameter server" else max(out)
    if name == "tree all_reduce":  # rank 0 receives the data of one rank at each level, and sends as much back
        assert plans.cost(name, world_size, n).nbytes == max(plans.through_ranks(links).values())
    elif name == "halving and doubling" and world_size == 3:
        # halving, doubling, and the data of the third rank in both directions
        assert plans.cost(name, 3, n).nbytes >= busiest
    else:
        assert plans.cost(name, world_size, n).nbytes == busiest
