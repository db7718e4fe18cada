"""Pictures state their result in text, show the numbers correctly, and are readable on light and dark pages."""

from __future__ import annotations

import html
import io
import json
import subprocess
import sys
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.image import imread
from matplotlib.text import Text

from ddp_notebook.errors import CannotWriteError, HostError, NoSessionError, UsageError
from ddp_notebook.observe.figures import curves, drawing, figures, palette
from ddp_notebook.observe.files import load
from ddp_notebook.observe.recording import Recording
from ddp_notebook.observe.report.bandwidth import bandwidth
from ddp_notebook.observe.steps.steps import steps
from ddp_notebook.observe.views import WARM_UP, Bandwidth
from ddp_notebook.records import names
from ddp_notebook.records.codec import Batch
from ddp_notebook.records.schema import METRIC, STEP_UNITS
from ddp_notebook.widgets.html.page import of_recording
from ddp_notebook.widgets.still import saved_summary
from tests.observe.batches import Rank
from tests.observe.synthetic import MS, Synthetic, simulate

pytestmark = pytest.mark.slow


def logged(values, name="loss", cell=1, first=0, into=None, is_given=True, unit="step"):
    """Return a recording of a metric: values by rank, one per step. The program passed the steps or not."""
    recording = into or Recording(max(values) + 1)
    for rank, own in values.items():
        rows = np.zeros(len(own), METRIC)
        rows["rank"], rows["name"], rows["cell"] = rank, 1, cell
        rows["step"], rows["value"], rows["is_given"] = first + np.arange(len(own)), own, is_given
        rows["unit"] = STEP_UNITS.index(unit)
        stream = hash((rank, name, cell)) % 2**31
        recording._feed(Batch(rank=rank, stream=stream, texts={1: name}, tables={"metric": rows}))
    return recording


def title(figure):
    return figure.get_suptitle()


def words(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def bars(axes, meaning):
    """Return (x, y, width, height) of the bars with this meaning, by position."""
    style = drawing.fill_style(meaning)
    mine = [one for one in axes.patches if one.get_facecolor() == style["facecolor"]]
    mine = [one for one in mine if one.get_hatch() == style["hatch"] and one.get_width() and one.get_height()]
    return [(one.get_x(), one.get_y(), one.get_width(), one.get_height()) for one in mine]


# ---- a metric


def test_the_repr_of_a_metric_names_the_access_to_its_values():
    recording = logged({0: [2, 1.5], 1: [2.2, 1.6]})
    assert repr(recording.metrics["loss"]) == (
        "<Metric loss: 4 values of ranks 0,1; of_rank(0) returns steps and values, to_pandas('metric') a table>"
    )
    nameless = logged({1: [2]}, name="")
    assert repr(nameless.metrics[""]).startswith("<Metric '': 1 value of rank 1; of_rank(1) returns ")


def test_loss_has_a_line_for_each_rank_with_its_name_at_the_end():
    figure = figures.loss(logged({0: [2, 1.5, 1], 1: [2.2, 1.6, 1.2], 2: [2.4, 1.4, 0.8]}))
    (axes,) = figure.axes

    assert title(figure) == "loss falls from 2.2 to 1 in 3 steps; at the end the ranks are between 0.8 and 1.2"
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [
        [2, 1.5, 1],
        [2.2, 1.6, 1.2],
        [2.4, 1.4, 0.8],
    ]
    assert words(axes) == ["rank 2: 0.8", "rank 0: 1", "rank 1: 1.2"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")


def test_ranks_that_logged_the_same_share_a_line():
    figure = figures.loss(logged({rank: [0.1, 0.9] for rank in range(64)}, name="accuracy"))

    assert title(figure) == "accuracy rises from 0.1 to 0.9 in 2 steps, the same on all ranks"
    assert words(figure.axes[0]) == ["ranks 0-63: 0.9"]


def test_many_ranks_are_drawn_as_range_median_and_outliers():
    values = {rank: np.linspace(2, 1, 30) + 0.001 * rank for rank in range(64)}
    for rank in (7, 40, 12):
        values[rank] = values[rank] + 1 + rank / 100
    figure = figures.loss(logged(values))
    (axes,) = figure.axes

    assert len(axes.collections) == 1 and len(axes.lines) == 4  # the band; the median and three ranks
    assert words(axes) == ["band: the range of 64 ranks", "median", "rank 7: 2.08", "rank 12: 2.13", "rank 40: 2.44"]


@pytest.mark.long
def test_labels_of_up_to_sixteen_ranks_do_not_overlap():
    figure = figures.loss(logged({rank: [2, 1 + rank / 1000] for rank in range(16)}))
    figure.draw_without_rendering()
    # Use only the text: the extent of an annotation includes its line.
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts if text.get_text()]
    extents = sorted((box.y0, box.y1) for box in boxes)

    assert len(extents) == 16
    assert all(above[0] >= below[1] - 2 for below, above in pairwise(extents))
    assert extents[0][0] >= 0 and extents[-1][1] <= figure.bbox.y1


def test_what_is_no_number_is_the_result():
    figure = figures.loss(logged({0: [2, 1, 1], 1: [2, np.nan, np.nan], 2: [2, np.inf, 1]}))

    assert title(figure) == "loss becomes nan at step 1 on ranks 1,2"
    assert "rank 1: nan from step 1" in words(figure.axes[0])
    assert title(figures.loss(logged({0: [np.nan] * 3}))) == "loss becomes nan at step 0 on rank 0"


def test_many_ranks_without_a_number_are_drawn_too():
    figure = figures.loss(logged({rank: [np.nan, np.nan + rank] for rank in range(20)}))

    assert title(figure) == "loss becomes nan at step 0 on ranks 0-19"


@pytest.mark.long
def test_cells_that_go_on_are_one_line_and_others_only_the_last():
    went_on = logged({0: [1, 0.5]}, cell=2, first=3, into=logged({0: [3, 2, 1.5]}))
    anew = logged({0: [9, 8]}, cell=2, into=logged({0: [3, 2, 1.5]}))
    counted = logged({0: [9, 8]}, cell=2, first=10, into=logged({0: [3, 2, 1.5]}), is_given=False)

    assert np.asarray(figures.loss(went_on).axes[0].lines[0].get_xdata()).tolist() == [0, 1, 2, 3, 4]
    assert title(figures.loss(anew)) == "loss falls from 9 to 8 in 2 steps (cell 2)"
    assert title(figures.loss(counted)) == "loss falls from 9 to 8 in 2 steps (cell 2)", "another training"
    assert title(figures.loss(anew, cell=1)) == "loss falls from 3 to 1.5 in 3 steps (cell 1)"

    anew.prompts.update({1: "In [6]", 2: "In [9]"})
    assert title(figures.loss(anew)) == "loss falls from 9 to 8 in 2 steps (In [9])"
    assert title(figures.loss(anew, cell=1)) == "loss falls from 3 to 1.5 in 3 steps (In [6])"
    with pytest.raises(
        UsageError, match=r"^loss was not recorded in cell 4, but in cells 1 \(In \[6\]\), 2 \(In \[9\]\)$"
    ):
        figures.loss(anew, cell=4)


@pytest.mark.long
@pytest.mark.parametrize("unit", STEP_UNITS)
def test_the_axis_names_what_the_steps_count(unit):
    recording = logged({0: [2, 1, 0.5], 1: [2, np.nan, 1]}, is_given=False, unit=unit)
    figure = figures.loss(recording)
    assert figure.axes[0].get_xlabel() == unit
    assert title(figure) == f"loss becomes nan at {unit} 1 on rank 1"
    assert f"rank 1: nan from {unit} 1" in words(figure.axes[0])
    again = logged({0: [2, 1]}, is_given=False, unit=unit)
    assert title(figures.loss(again)) == f"loss falls from 2 to 1 in 2 {unit}s"
    assert saved_summary.text(recording).endswith(f"loss nan from {unit} 1")
    page = of_recording(recording, None, "2 ranks", "key")
    assert f"; by {unit}, " in page and f">{unit}</text>" in page


def test_the_metric_that_is_drawn_can_be_chosen():
    recording = logged({0: [1, 2]}, name="train_loss", into=logged({0: [5, 5]}, name="accuracy $"))

    assert title(figures.loss(recording)) == "train_loss rises from 1 to 2 in 2 steps"
    figure = figures.loss(recording, "accuracy $")
    assert title(figure) == "accuracy $ stays at 5 for 2 steps"
    assert figure._repr_png_()  # a dollar does not start a formula


def test_a_loss_over_decades_has_a_logarithmic_axis():
    assert figures.loss(logged({0: [100.0, 0.01]})).axes[0].get_yscale() == "log"
    assert figures.loss(logged({0: [1.0, 0.5]})).axes[0].get_yscale() == "linear"


# ---- steps


def test_steps_are_bars_whose_parts_add_up():
    run = simulate(slow=2, phase="forward", extra_ms=50, steps=12)
    figure = figures.steps(run)
    by_rank, by_step = figure.axes

    assert title(figure) == "A step takes 84.5 ms: 50 % compute, 44 % waiting for rank 2"
    assert [label.get_text() for label in by_rank.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]
    assert [round(width) for _, _, width, _ in bars(by_rank, "waiting")] == [50, 50, 50]  # rank 2 does not wait
    every = [bar for part in palette.FILLS for bar in bars(by_rank, part)]
    for rank in range(4):
        own = [step.duration_ns for step in steps(run, rank=rank) if step.step >= WARM_UP]
        assert sum(width for _, y, width, _ in every if round(y + 0.39) == rank) == pytest.approx(np.median(own) / MS)
    assert len(bars(by_step, "compute")) == 12
    assert by_rank.get_xlabel() == "time per step (ms), mean of the steps"
    assert by_step.get_ylabel() == "time (ms), mean of ranks"


@pytest.mark.long
def test_ranks_of_several_hosts_stand_under_their_hosts():
    run = simulate(slow=2, phase="forward", extra_ms=50, steps=12)
    run.hosts = ("gpu1", "gpu1", "gpu2", "gpu2")
    figure = figures.steps(run)
    by_rank = figure.axes[0]
    (beside,) = by_rank.child_axes

    assert title(figure) == "A step takes 84.5 ms: 50 % compute, 44 % waiting for rank 2 on gpu2"
    assert [label.get_text() for label in beside.get_yticklabels()] == ["gpu1", "gpu2"]
    assert beside.get_yticks().tolist() == [0, 2]
    assert [np.asarray(line.get_ydata())[0] for line in by_rank.get_lines()] == [1.5]


def test_many_steps_are_drawn_together():
    figure = figures.steps(simulate(world_size=2, steps=500))

    assert figure.axes[1].get_xlabel() == "step (4 together)"
    areas = [one.get_paths()[0].get_extents() for one in figure.axes[1].collections]
    assert all((area.x0, area.x1) == (-0.5, 499.5) for area in areas)
    assert len(areas) == 7 - 1, "no rank waits"


def test_a_slow_first_step_does_not_hide_the_other_steps():
    run = Synthetic(1)
    at = 0
    for step in range(20):
        took = 1000 * MS if step == 0 else 10 * MS
        run.span(0, "forward", "Net", at, at + took, step=step)
        run.span(0, "optimizer", "SGD", at + took, at + took + MS, step=step)
        at += took + MS
    below = figures.steps(run).axes[1]

    assert below.get_ylim()[1] < 20
    assert words(below) == ["↑ 1.00 s"]


def test_labels_of_steps_beyond_the_axis_do_not_overlap():
    run = Synthetic(1)
    at = 0
    for step in range(60):
        took = {10: 30, 12: 400, 14: 200, 50: 300}.get(step, 10) * MS
        run.span(0, "forward", "Net", at, at + took, step=step)
        run.span(0, "optimizer", "SGD", at + took, at + took + MS, step=step)
        at += took + MS
    below = figures.steps(run).axes[1]

    assert words(below) == ["↑ 401 ms", "301 ms ↑"]
    top = below.get_ylim()[1]
    assert all(text.get_position()[1] > top for text in below.texts), "no bar is behind a label"


def test_without_a_straggler_nobody_is_said_to_be_waited_for():
    figure = figures.steps(simulate(noise_ms=8, seed=3))

    assert "% waiting for others" in title(figure)


# ---- buckets


def test_buckets_stand_beside_the_backward():
    run = simulate(slow=1, phase="backward", extra_ms=10, transfer_ms=2, steps=3)
    figure = figures.buckets(run)
    (axes,) = figure.axes

    assert title(figure) == (
        "50 % of the transfer of 4 buckets (4.2 MB) is hidden; exposed: 2.00 ms, and 10.0 ms of waiting "
        "(rank 0, cell 1, step 2)"
    )
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["backward", *(f"layers.{3 - at}.weight  1.0 MB  #{at}" for at in range(4))]
    # issued every 5 ms; the other ranks issue the third one 10 ms later
    assert [(x, width) for x, y, width, _ in bars(axes, "hidden") if y > 0.5] == [(5, 2), (10, 2)]
    waited = {round(y + 0.36): (x, width) for x, y, width, _ in bars(axes, "waiting")}
    assert waited == {0: (20, 10), 3: (15, 10), 4: (20, 10)}
    assert {round(y + 0.36): (x, width) for x, y, width, _ in bars(axes, "exposed")} == {
        0: (30, 2),
        3: (25, 2),
        4: (30, 2),
    }
    assert axes.get_xlabel() == "time since the backward began (ms)"


def test_a_long_list_of_parameters_is_short_in_a_picture():
    run = simulate(world_size=1, steps=1, buckets=9)

    label = figures.buckets(run).axes[0].get_yticklabels()[1].get_text()
    assert label == "layers.0.weight, 8 more  9.4 MB  #0"


def test_a_bucket_that_is_still_under_way_is_drawn():
    run = simulate(world_size=2, steps=2)
    for row in run._rows["call"]:
        row["end_ns"] = -1
    run._tables.clear()

    assert figures.buckets(run).axes[0].patches


# ---- bandwidth


@pytest.mark.long
def test_bandwidth_has_a_line_per_operation_over_message_size():
    found = [
        Bandwidth(
            op=op,
            group="default",
            world_size=4,
            nbytes=nbytes,
            count=3,
            transfer_ns=1,
            algorithm_gb_s=1.0,
            bus_gb_s=factor * nbytes / 1e6,
        )
        for op, factor in (("all_gather", 0.75), ("all_reduce", 1.5))
        for nbytes in (1000, 100_000, 1_000_000)
    ]
    figure = curves.bandwidth(Recording(4), found, None)
    (axes,) = figure.axes

    assert title(figure) == "all_reduce reaches 1.5 GB/s of bus bandwidth at 1.0 MB"
    assert words(axes) == ["all_gather, 4 ranks", "all_reduce, 4 ranks"]
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.lines] == [[1000, 100_000, 1_000_000]] * 2
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("message size (bytes)", "bus bandwidth (GB/s)")
    figure.draw_without_rendering()
    assert {"1 kB", "10 kB", "100 kB", "1 MB"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_one_point_is_a_picture_too():
    run = simulate(is_ddp=False, bucket_nbytes=1_000_000)

    assert len(bandwidth(run)) == 1
    assert figures.bandwidth(run)._repr_png_()


# ---- nothing to draw


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda: figures.loss(Recording(2)),
            "no metric was recorded; write log(loss=loss) in the cell, or run it with",
        ),
        (lambda: figures.loss(logged({0: [1]}), "los"), "metric 'los' was not recorded; the recorded metrics are loss"),
        (lambda: figures.loss(logged({0: [1]}), cell=4), "loss was not recorded in cell 4, but in cell 1"),
        (
            lambda: figures.steps(Synthetic(2)),
            "no step was recorded; run a cell that calls optimizer.step(), with %ddp",
        ),
        (lambda: figures.steps(simulate(steps=1), cell=9), "no step was recorded in cell 9; run a cell"),
        (lambda: figures.buckets(simulate(is_ddp=False)), "rank 0 synchronised no gradient bucket; train a model in"),
        (lambda: figures.buckets(simulate(steps=2), cell=5), "rank 0 synchronised no gradient bucket in cell 5; train"),
        (lambda: figures.buckets(simulate(steps=2), rank=4), "rank 4 does not exist; the ranks are 0 to 3"),
        (
            lambda: figures.buckets(simulate(steps=3), step=3),
            "step 3 of rank 0 has no buckets; steps with buckets in cell 1: 0 to 2",
        ),
        (
            lambda: figures.bandwidth(Synthetic(2)),
            "no transfer between ranks was recorded; run a cell that communicates",
        ),
        (lambda: figures.bandwidth(simulate(world_size=1)), "no transfer between ranks was recorded"),
    ],
)
def test_a_plot_without_data_raises_an_error_with_a_remedy(draw, message):
    with pytest.raises(UsageError) as error:
        draw()

    assert message in str(error.value)


# ---- how they look


def contrast(color, page):
    """Contrast of WCAG 2.1: 3 for areas and lines, 4.5 for small text. Here both pages count."""
    light, dark = sorted((luminance(color), luminance(page)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def laid_on(color, page):
    *parts, opacity = to_rgba(color)
    return [opacity * part + (1 - opacity) * below for part, below in zip(parts, to_rgb(page), strict=True)]


def luminance(color):
    parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color)]
    return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))


@pytest.mark.parametrize("page", ["#FFFFFF", "#111111"])
def test_colours_read_on_both_pages(page):
    assert contrast(palette.INK, page) > 3.9
    for line in palette.LINES:
        assert contrast(line, page) > 3, line
    for fill in (*palette.FILLS.values(), *palette.ACTIONS.values()):
        is_hollow = fill.hatch == "" and fill.edge != "none"
        assert contrast(fill.edge if is_hollow else fill.face, page) > (3.9 if is_hollow else 2), fill
        if is_hollow:  # the background of the page is visible inside, light or dark
            assert contrast(laid_on(fill.face, page), page) < 1.5, fill


@pytest.mark.parametrize(
    "draw",
    [
        lambda: figures.loss(logged({0: [2, 1], 1: [2, 1.5]})),
        lambda: figures.steps(simulate(steps=4)),
        lambda: figures.buckets(simulate(steps=4)),
        lambda: figures.bandwidth(simulate(steps=4)),
    ],
    ids=["loss", "steps", "buckets", "bandwidth"],
)
def test_a_notebook_shows_a_picture_on_its_own_ground(draw):
    data, size = draw()._repr_png_()
    image = imread(io.BytesIO(data))

    assert image.shape[:2] == (2 * size["height"], 2 * size["width"])
    assert image[0, 0, 3] == 0  # transparent
    inked = image[image[..., 3] > 0.9][:, :3]
    # no black, which would be invisible on a dark page
    assert len(inked) > 1000 and not (inked < 0.05).all(axis=1).any()


LAZY = """
import sys
from ddp_notebook.observe.figures import figures
from ddp_notebook.observe.trace import trace
assert "matplotlib" not in sys.modules and "torch" not in sys.modules
from tests.observe.synthetic import simulate
figures.steps(simulate(steps=3))
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules, "torch" in sys.modules)
"""


@pytest.mark.processes
def test_the_first_figure_imports_matplotlib_but_never_pyplot():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "False", "False"]


# Names that users may choose: markup, formulas, templates, patterns, paths, control characters, half a character.
NAMES = [
    "a $x_$ $y",
    "</script><!-- </title>",
    "$title ${picture}",
    "_hidden",
    "\\g<1> \\1 [a-z](",
    "a\nb\tc",
    "\ud800",
]
MORE_NAMES = [
    "$\\frac$",
    "\\$",
    "<script>alert(1)</script>",
    "{x} {0}",
    "%s %d %",
    "__proto__",
    "../../etc/passwd",
    "\0",
    "&lt;b&gt;",
    "'\"`",
    "# | *a* [b](c)",
    "n" * 3000,
]
ALL_NAMES = [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_NAMES)]


@pytest.mark.long
@pytest.mark.parametrize("name", ALL_NAMES, ids=ascii)
@pytest.mark.filterwarnings("error")
def test_a_name_is_shown_as_it_is_wherever_it_stands(name, tmp_path):
    recording = logged({0: [2.0, 1.0], 1: [2.2, 1.2]}, name=name)
    shown = name.replace("\ud800", "\\ud800")
    figure = figures.loss(recording, shown)
    data, _ = figure._repr_png_()
    assert data.startswith(b"\x89PNG")
    readable = "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in shown)
    assert figure.get_suptitle().startswith(f"{readable} falls from 2.1 to 1.1")
    assert figure.axes[0].get_ylabel() == readable
    for page in (
        recording.save_html(tmp_path / "page.html").read_text(encoding="utf-8"),
        of_recording(recording, None, f"session {shown}", "key"),
    ):
        assert "<script>alert" not in page and "</title>" not in page.partition("</title>")[2]
        assert html.escape(shown)[:200] in page or html.escape(names.readable(shown)) in page or len(shown) > 1000
    recording.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(shown in str(event["name"]) for event in events)
    recording.save(tmp_path / "run.npz")
    assert [*load(tmp_path / "run.npz").metrics] == [shown]


@pytest.mark.filterwarnings("error")
def test_a_glyph_missing_in_the_font_is_replaced_silently():
    recording = logged({0: [2.0, 1.0]}, name="Verlust \u03bb \u635f\u5931")
    figure = figures.loss(recording)
    assert figure._repr_png_()[0].startswith(b"\x89PNG")
    assert figure.axes[0].get_ylabel() == "Verlust \u03bb \ufffd\ufffd"
    assert saved_summary.picture(recording).startswith(b"\x89PNG")
    assert saved_summary.text(recording).startswith("cell 1: 1 rank, Verlust \u03bb \u635f\u5931 2.00 -> 1.00")


@pytest.mark.parametrize("name", ["a metric with a name that is longer than its axis is high", "loss"])
def test_the_name_of_a_metric_is_not_longer_than_its_axis(name, monkeypatch):
    seen = []

    def draw(text, renderer):
        if text.get_text()[:4] == name[:4] and text.get_rotation() == 90:
            axis = text.figure.axes[0].get_window_extent(renderer).height
            seen.append((text.get_text(), text.get_window_extent(renderer).height, axis))
        original(text, renderer)

    original = Text.draw
    monkeypatch.setattr(Text, "draw", draw)
    saved_summary.picture(logged({0: [2.0, 1.0]}, name=name))
    ((shown, label, axis),) = seen
    assert label <= axis
    assert shown == name if name == "loss" else (shown.endswith("\N{HORIZONTAL ELLIPSIS}") and label > 0.8 * axis)


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_labels_of_powers_stay_formulas():
    figure = figures.loss(logged({0: [1e5, 1.0, 1e-3]}, name="$a$"))
    figure._repr_png_()
    ticks = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert any("mathdefault" in text for text in ticks)
    assert all(label.get_parse_math() for label in figure.axes[0].get_yticklabels())


def test_a_users_settings_of_matplotlib_are_not_needed_for_names():
    with matplotlib.rc_context({"text.usetex": True, "text.parse_math": False}):
        assert figures.loss(logged({0: [2.0, 1.0]}, name="a_b $x$ & 5 %"))._repr_png_()[0]


def test_an_error_that_lists_names_is_short_and_printable():
    recording, rank = Recording(1), Rank(0)
    odd = ["\x1b[31mred", "n\nl", "", "loss"]
    many = [*odd, *(f"x{at}" for at in range(2000))]
    recording._feed(rank.batch(*(rank.row("metric", name=name, value=3.0, cell=1) for name in many)))
    with pytest.raises(UsageError) as error:
        recording.plot.loss("no\x1bpe")
    assert str(error.value) == (
        r"metric 'no\x1bpe' was not recorded; the recorded metrics are '\x1b[31mred', 'n\nl', '', loss, x0, x1, x2, "
        "x3 and 1,996 more"
    )
    with pytest.raises(UsageError) as error:
        recording.plot.loss("\x1b[31mred", cell=2)
    assert str(error.value).startswith(r"'\x1b[31mred' was not recorded in cell 2")
    assert recording.plot.loss("").get_suptitle() == " is 3"
    assert repr(recording.metrics).startswith(r"<MetricTable: '\x1b[31mred', 'n\nl', '', loss, x0")


@pytest.mark.parametrize("kind", [UsageError, CannotWriteError, HostError, NoSessionError])
def test_no_error_of_ours_obeys_what_it_quotes(kind):
    assert str(kind("a\x1b[31m\x07b\n\tc\ud800")) == "a\\x1b[31m\\x07b\n\tc\\ud800"
