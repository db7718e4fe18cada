"""The saved summary of a live view: a line of text and a picture."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from ddp_notebook.observe.observer import Observer
from ddp_notebook.observe.recording import Recording
from ddp_notebook.records import units
from ddp_notebook.widgets.html import page
from ddp_notebook.widgets.simulated.simulation import simulate
from ddp_notebook.widgets.still import saved_summary
from tests.observe import synthetic
from tests.observe.batches import Rank
from tests.observe.test_figures import logged

LIGHT, DARK = "#ffffff", "#111111"


def recorded(**arguments):
    """Return a real recording of a synthetic run."""
    run = synthetic.simulate(**arguments)
    recording = Recording(run.world_size)
    for batch in run.batches():
        recording._feed(batch)
    return recording


def opened(data: bytes) -> PngImageFile:
    with PngImageFile(io.BytesIO(data)) as image:
        image.load()
        return image


# ---- the text


def test_the_text_states_the_result():
    recording = simulate(world_size=4)

    assert saved_summary.text(recording, 2) == (
        "cell 2: 4 ranks, 60 steps, loss 0.205 -> 0.107, 46.5 ms/step, 9.6 % exposed communication, rank 2 slowest"
    )
    assert saved_summary.text(recording, 1) == (
        "cell 1: 4 ranks, 60 steps, loss 2.31 -> 0.215, 39.0 ms/step, 11 % exposed communication"
    )
    assert saved_summary.text(recording) == saved_summary.text(recording, 2), (
        "one training run, and not all of them in one"
    )


def test_the_ranks_of_a_run_are_those_that_it_had():
    """A rank has left before the second run, and the tables contain rows of all ranks."""
    recording = recorded(world_size=2, steps=20, cell=2, into=synthetic.simulate(world_size=3, steps=20))
    assert saved_summary.text(recording, 1).startswith("cell 1: 3 ranks, 20 steps, ")
    assert saved_summary.text(recording, 2).startswith("cell 2: 2 ranks, 20 steps, ")
    observer = Observer(3, lambda rank, message: None, list, tuple)
    observer.recording.hosts = ("a", "a", "b")
    for batch in synthetic.simulate(world_size=3, steps=20, cell=1).batches():
        observer.recording._feed(batch)
    observer.on_renumbered({0: 0, 1: 1}, 2)
    for hosts in ((), ("a", "a")):
        observer.recording.hosts = hosts
        shown = page.of_recording(observer.recording, 1, "2 ranks", "key")
        assert '<th scope="row">2</th>' in shown, "it has taken steps"
        shown = page.of_recording(observer.recording, 2, "2 ranks", "key")
        assert '<th scope="row">1</th>' in shown and '<th scope="row">2</th>' not in shown
    observer.close()


def test_its_figures_are_those_of_the_report():
    recording = recorded(world_size=4, steps=40, slow=1, phase="forward", extra_ms=30, noise_ms=1)
    overall = recording.report(1).overall

    exposed = 100 * overall.share(overall.exposed_ns)
    words = saved_summary.text(recording, 1)
    assert f" {units.ms(overall.step_ns)}/step" in words and words.endswith("rank 1 slowest")
    assert exposed == pytest.approx(float(words.split(" % exposed")[0].split()[-1]), abs=0.2)


@pytest.mark.parametrize(
    ("recording", "words"),
    [
        (Recording(4), "4 ranks, nothing recorded"),
        (Recording(1), "1 rank, nothing recorded"),
        (logged({0: [2.0, 1.5, 1.0]}), "cell 1: 1 rank, loss 2.00 -> 1.00"),
        (logged({0: [2.0], 1: [3.0]}), "cell 1: 2 ranks, loss 2.50"),
        (logged({0: [2.0, 1.0], 1: [2.0, np.nan]}), "cell 1: 2 ranks, loss nan from step 1"),
        (logged({0: [0.5, 0.9]}, name="accuracy"), "cell 1: 1 rank, accuracy 0.500 -> 0.900"),
        (logged({0: [2e-5, 1e-6]}), "cell 1: 1 rank, loss 2.00e-5 -> 1.00e-6"),
        (recorded(world_size=2, steps=3, has_optimizer=False, is_ddp=False), "2 ranks, 6 communication calls"),
        (recorded(world_size=1, steps=30), "cell 1: 1 rank, 30 steps, 34.5 ms/step"),
    ],
)
def test_each_part_is_told_only_where_it_is_known(recording, words):
    assert saved_summary.text(recording) == words


def test_an_empty_cell_and_dropped_rows_are_reported():
    recording = logged({0: [1.0]})
    recording._feed(Rank(0).batch(dropped=1234))

    assert saved_summary.text(recording, 7) == "cell 7: 1 rank, nothing recorded, 1,234 rows lost"


def test_cells_that_do_not_follow_each_other_are_not_one_course():
    recording = logged({0: [9.0, 8.0]}, cell=1)
    logged({0: [2.0, 1.0]}, cell=2, into=recording)

    assert saved_summary.text(recording) == "cell 2: 1 rank, loss 2.00 -> 1.00"
    logged({0: [0.5, 0.25]}, cell=3, first=2, into=recording)
    assert saved_summary.text(recording) == "cell 3: 1 rank, loss 2.00 -> 0.250", "it goes on from the second cell"
    assert saved_summary.text(recording, 1) == "cell 1: 1 rank, loss 9.00 -> 8.00"


def test_the_text_of_a_chosen_cell_begins_with_its_label():
    recording = logged({0: [2.0, 1.0], 1: [2.0, 1.0]}, cell=9)
    logged({0: [2.0, 1.0], 1: [2.0, 1.0]}, cell=10, first=2, into=recording)
    recording.prompts.update({9: "In [6]", 10: "In [7]"})

    assert saved_summary.text(recording, 9) == "In [6]: 2 ranks, loss 2.00 -> 1.00"
    assert saved_summary.text(recording, 10) == "In [7]: 2 ranks, loss 2.00 -> 1.00"
    picture = opened(saved_summary.picture(recording, 9))
    assert picture.text["Description"] == saved_summary.text(recording, 9)


# ---- the picture


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "steps"), [(1, 40), (4, 120), (64, 200)])
def test_the_picture_is_small_fast_and_says_what_it_shows(world_size, steps):
    recording = simulate(world_size, steps=steps)
    saved_summary.picture(Recording(1))  # imports matplotlib
    began = time.process_time()
    data = saved_summary.picture(recording)
    took = time.process_time() - began

    assert took < 1.5, "0.3 to 0.6 s were measured on a quiet machine"
    assert len(data) < 60_000
    image = opened(data)
    assert image.size == (1209, 446)
    assert image.text["Description"] == saved_summary.text(recording)


@pytest.mark.long
@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_it_reads_on_a_light_and_on_a_dark_page(ground):
    image = opened(saved_summary.picture(simulate(4))).convert("RGBA")
    page = Image.new("RGBA", image.size, ground)
    page.alpha_composite(image)
    title = np.asarray(page.convert("L"), float)[:26]  # contains only text
    paper = title[0, -1]

    def luminance(grey):
        return (grey / 255) ** 2.2

    inked = title[np.abs(title - paper).argmax() // title.shape[1], np.abs(title - paper).argmax() % title.shape[1]]
    light, dark = max(luminance(inked), luminance(paper)), min(luminance(inked), luminance(paper))
    assert (light + 0.05) / (dark + 0.05) > 3.5, "of the contrast that WCAG asks of large words, 3"


@pytest.mark.slow
def test_it_draws_what_there_is_and_of_nothing_only_the_words():
    heights = {}
    for name, recording in {
        "nothing": Recording(4),
        "metric": logged({0: [2.0, 1.5, 1.0]}),
        "steps": recorded(world_size=2, steps=10),
        "nan": logged({0: [2.0, np.nan], 1: [np.nan, np.nan]}),
        "one step": recorded(world_size=2, steps=1),
    }.items():
        image = opened(saved_summary.picture(recording))
        heights[name] = image.size[1]
        assert image.text["Description"] == saved_summary.text(recording)
    assert (
        heights["nothing"] == heights["one step"] < 80
        and heights["metric"] == heights["steps"] == heights["nan"] == 446
    )


def test_the_users_pyplot_does_not_notice():
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []
    saved_summary.picture(simulate(2, steps=10))
    assert plt.get_fignums() == []


# ---- many names


@pytest.mark.slow
def test_many_names_hold_the_prompt_no_longer_than_one():
    """A mask over all rows for each name took 4 s for 40,000 names."""
    recording, ranks = Recording(2), (Rank(0), Rank(1))
    for rank in ranks:
        rows = [rank.row("metric", name=f"x{at}", value=float(at), cell=1) for at in range(20_000)]
        recording._feed(rank.batch(*rows))
    began = time.process_time()
    words, _ = saved_summary.text_and_picture(recording, 1)
    took = time.process_time() - began

    assert words == "cell 1: 2 ranks, x0 0 (one of 20,000 metrics)"
    assert took < 0.5, "0.04 s were measured on a quiet machine"


# ---- steps


@pytest.mark.parametrize(
    ("given", "labels", "begin"),
    [
        ({}, ("step", "step"), 0),
        ({"first": 100}, ("step", "step"), 100),
        ({"first": 100, "every": 7}, ("step, as logged", "step of the cell"), 0),
    ],
)
def test_loss_and_bars_have_the_same_steps(given, labels, begin):
    """A loss axis of 100 to 129 stood next to bars of steps 0 to 29."""
    recording = recorded(world_size=2, steps=30)
    values = np.arange(30.0)[:: given.get("every", 1)]
    logged({0: values, 1: values}, cell=1, first=given.get("first", 0), into=recording, is_given=bool(given))
    figure = saved_summary._draw(saved_summary._Facts.of(recording, None))
    assert tuple(axes.get_xlabel() for axes in figure.axes) == labels
    assert round(figure.axes[1].dataLim.x0 + 0.43) == begin
