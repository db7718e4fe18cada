"""Make the pictures of the guide's pages about %ddp_verify, %ddp_nan, %ddp_diff, %%ddp_twice and %ddp_memory --why.

    python -m tools.command_pictures docs
    python -m tools.command_pictures docs nan diff    only these

Each picture comes from a run on two ranks, which run the cells of the page. Its title has the command and the first
sentence of its output. The output is printed, for the text of the page.
"""

from __future__ import annotations

import argparse
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

import ddp_notebook
from ddp_notebook.errors import RankError
from ddp_notebook.observe.compare.times import PARTS
from ddp_notebook.observe.figures.drawing import Picture, fill_style, key, picture
from ddp_notebook.observe.figures.palette import FILLS, INK, LINES
from ddp_notebook.observe.nan.gradient_inputs import GradientInputs, calls_of
from ddp_notebook.run.sharding.out_of_memory import QUESTION, why
from ddp_notebook.run.twice.twice import run_twice
from ddp_notebook.session import Session

_GUIDE = Path(__file__).parents[1] / "docs" / "guide"
_CELL = re.compile(
    r"^```python\n%%(?:on_all_ranks|ddp_twice)\n(.*?)^```$|^%on_all_ranks (.*?)$", re.MULTILINE | re.DOTALL
)
_MOST_BYTES = 120_000
_COLOURS = 64
_TITLE_CHARACTERS = 108  # in a line
_TITLE_PT = 9.5
_TEXT_PT = 8.5
_GOOD, _BAD, *_RANKS = LINES  # the colours of equal or finite tensors, of others, and of the ranks
_LOSSES = (
    "F.cross_entropy(model(x), y)",
    "F.cross_entropy(model.module(x), y)",
    'F.cross_entropy(model(x), y, reduction="sum")',
    "F.cross_entropy(model(x), y) / world_size",
)
_KINDS = ("batch", "local gradient", "gradient", "parameter")
# Keeps the number of different tensors by step and kind, which `%%ddp_twice` does not return.
_KEEP_DIFFERENCES = """
import ddp_notebook.rank.twice.observation as observation

def keep(before, after, compare=observation.first_difference):
    global differences
    differences = {}
    for key, checksum in before.checksums.items():
        step, kind = key[:2]
        differences[f"{step} {kind}"] = differences.get(f"{step} {kind}", 0) + (after.checksums.get(key) != checksum)
    return compare(before, after)

observation.first_difference = keep
"""


def run_cells(session: Session, page: str) -> list[str]:
    """Run the cells for all ranks of a page, except those of `%%ddp_twice`. Return the code of all."""
    text = (_GUIDE / f"{page}.md").read_text()
    codes = []
    for found in _CELL.finditer(text):
        codes.append(found[1] or found[2])
        if "%%ddp_twice\n" in found[0] or _is_not_run(text, found.start()):
            continue
        number = len(codes)
        try:
            session.run(codes[-1], quiet=True, execution_count=number, file=f"In [{number}]")
        except RankError:
            if page != "memory":
                raise
    return codes


def _is_not_run(text: str, at: int) -> bool:
    return text[:at].rstrip().endswith("-->") and "<!-- not run" in text[:at].rstrip().splitlines()[-1]


def begin(command: str, sentence: str, height: float, columns: Sequence[float]) -> tuple[Picture, list[Axes]]:
    """Create a picture whose title is a command and the first sentence of its output."""
    lines = textwrap.wrap(sentence, _TITLE_CHARACTERS)
    return picture("\n".join([command, *lines]), height, columns=columns, title_pt=_TITLE_PT)


def draw_verify(session: Session) -> Picture:
    """Draw the differences of three gradients for four losses, with the sentence about each."""
    run_cells(session, "verify")
    print(session.verify())
    results = [session.verify(loss, batch=["x", "y"]) for loss in _LOSSES]
    print(*results, sep="\n")
    figure, (words, bars) = begin(
        "%ddp_verify LOSS --batch x,y", "Four losses, and the first sentence about each", 4.0, (1.6, 1.0)
    )
    words.axis("off")
    words.set_ylim(len(results) - 0.5, -0.5)
    for at, (loss, result) in enumerate(zip(_LOSSES, results, strict=True)):
        together = max(one.off_together for one in result.parameters)
        whole = max(one.off_whole for one in result.parameters)
        words.text(0, at - 0.28, loss, color=INK, fontsize=_TEXT_PT, family="monospace", weight="bold", va="center")
        sentence = "\n".join(textwrap.wrap(result.summary, 72))
        words.text(0, at - 0.14, sentence, color=INK, fontsize=_TEXT_PT, va="top")
        for place, share, color in ((at - 0.18, together, _BAD), (at + 0.18, whole, _GOOD)):
            bars.barh(place, share, 0.3, color=color)
            bars.text(share + 0.02, place, f"{share:.2g}", color=INK, fontsize=_TEXT_PT, va="center")
    bars.set_ylim(len(results) - 0.5, -0.5)
    bars.set_yticks([])
    bars.set_xlim(0, 1.25)
    bars.set_xlabel("relative difference of gradients")
    patches = [Patch(color=_BAD, label="together and parts"), Patch(color=_GOOD, label="parts and whole batch")]
    key(figure, [], patches)
    return figure


def draw_nan(session: Session) -> Picture:
    """Draw the losses of the ranks, and the gradients that were not finite, by rank and step."""
    run_cells(session, "nan")
    recording = session.recording
    found = recording.first_nan()
    print(found)
    figure, (left, right) = begin("%ddp_nan", found.sentence, 3.2, (1.0, 1.2))
    loss = recording._metrics_of(found.cell)["loss"]
    for rank in range(session.world_size):
        steps, values = loss.of_rank(rank)
        left.plot(steps, values, color=_RANKS[rank], marker="o", markersize=4, label=f"rank {rank}")
        first = steps[~np.isfinite(values)].min(initial=10**9)
        left.axvline(first, color=_RANKS[rank], linestyle=(0, (4, 2)), linewidth=1.0)
        left.text(
            first + 0.1,
            0.92 - 0.1 * rank,
            f"NaN on rank {rank}",
            color=_RANKS[rank],
            fontsize=_TEXT_PT,
            transform=left.get_xaxis_transform(),
        )
    left.set(xlabel="step", ylabel="loss", xlim=(-0.5, 11.9))
    gradients = GradientInputs(recording, calls_of(recording), found.cell)
    for step in map(int, gradients.looked_at_steps):
        for rank in gradients.ranks:
            is_bad = bool(gradients.bad(step, rank))
            right.bar(step, 0.8, 0.86, rank - 0.4, color=_BAD if is_bad else _GOOD)
            if is_bad:
                right.text(step, rank, "NaN", color="white", fontsize=_TEXT_PT, ha="center", va="center")
    right.grid(visible=False)
    right.set(xlabel="step", ylim=(gradients.ranks[-1] + 0.5, -0.5))
    right.set_yticks(gradients.ranks, [f"rank {rank}" for rank in gradients.ranks])
    right.set_title("gradients before the average", color=INK, fontsize=_TEXT_PT + 0.5)
    lines = [Line2D([], [], color=_RANKS[rank], marker="o", label=f"loss of rank {rank}") for rank in gradients.ranks]
    key(figure, [], [*lines, Patch(color=_GOOD, label="finite"), Patch(color=_BAD, label="not finite")])
    return figure


def draw_diff(session: Session) -> Picture:
    """Draw the parts of a step in both runs, and the relative difference of the losses."""
    run_cells(session, "diff")
    recording = session.recording
    found = recording.compare()
    print(found)
    figure, (left, right) = begin("%ddp_diff", f"Time: {found.time.sentence}.", 3.4, (1.0, 1.2))
    meanings = {"forward": "compute", "backward": "compute"}  # others: the name of the part
    ranks = sorted({one.rank for one in found.time.parts})
    shown = []
    for name in [name for name in PARTS if name != "remote calls"]:
        meaning = meanings.get(name, name)
        for one in [one for one in found.time.parts if one.part == name]:
            for side, nanoseconds in enumerate((one.before_ns, one.after_ns)):
                place = one.rank * 2.4 + side
                below = sum(
                    getattr(other, ("before_ns", "after_ns")[side])
                    for other in found.time.parts
                    if other.rank == one.rank and PARTS.index(other.part) < PARTS.index(name)
                )
                left.bar(place, nanoseconds / 1e6, 0.8, below / 1e6, **fill_style(meaning))
                if nanoseconds > 0.01 * found.time.after_ns and meaning not in shown:
                    shown.append(meaning)
    left.set_xticks(
        [rank * 2.4 + side for rank in ranks for side in (0, 1)],
        [f"{run}\nrank {rank}" for rank in ranks for run in "AB"],
    )
    left.grid(visible=False, axis="x")
    left.set_ylabel("time per step (ms)")
    first = found.numbers.first
    assert first is not None, "the page changes a batch"
    losses = [recording._metrics_of(run.cell)["loss"] for run in found.runs]
    for rank in ranks:
        steps, before = losses[0].of_rank(rank)
        after = losses[1].of_rank(rank)[1]
        right.plot(steps, np.abs(after / before - 1) * 100, color=_RANKS[rank], marker=".", label=f"rank {rank}")
    right.axvline(first.step, color=INK, linestyle=(0, (4, 2)), linewidth=1.0)
    right.set(xlabel="step", ylabel="difference of the loss (%)")
    right.set_title(
        f"Numbers: first difference in step {first.step}, on rank {first.ranks[0]}", color=INK, fontsize=_TEXT_PT + 0.5
    )
    key(figure, shown, [Line2D([], [], color=_RANKS[rank], marker=".", label=f"loss of rank {rank}") for rank in ranks])
    return figure


def draw_twice(session: Session) -> Picture:
    """Draw which tensors of both runs are equal, by rank, kind and step."""
    session.run(_KEEP_DIFFERENCES, quiet=True)
    codes = run_cells(session, "twice")
    result = run_twice(session._parts, session.run, codes[-1])
    print(result)
    figure, [axes] = begin("%%ddp_twice", f"{result.sentence}.", 3.2, (1.0,))
    counts = session["differences"]
    rows = [(rank, kind) for rank in sorted(counts) for kind in _KINDS]
    for at, (rank, kind) in enumerate(rows):
        for step in range(result.steps):
            differ = counts[rank][f"{step} {kind}"]
            axes.bar(step, 0.8, 0.9, at - 0.4, color=_BAD if differ else _GOOD)
            axes.text(
                step, at, "differs" if differ else "equal", color="white", fontsize=_TEXT_PT, ha="center", va="center"
            )
    axes.grid(visible=False)
    axes.set_yticks(range(len(rows)), [f"rank {rank}, {kind}" for rank, kind in rows])
    axes.set_xticks(range(result.steps))
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="step")
    return figure


def draw_memory(session: Session) -> Picture:
    """Draw the parts of the memory of the rank that ran out, and the resident memory of all ranks up to then."""
    run_cells(session, "memory")
    recording = session.recording
    found = why(session._ask(QUESTION, "out_of_memory"), recording)
    print(found)
    [(rank, facts)] = found.last.items()
    figure, (left, right) = begin("%ddp_memory --why", str(found).splitlines()[0], 3.6, (1.0, 1.2))
    parts = [(name.replace("_", " "), facts[name]) for name in ("parameters", "gradients", "optimizer_state")]
    parts += [(f"activations of {name}", nbytes) for name, nbytes in facts["activations"].items()]
    parts += [("tensors in variables", sum(facts["variables"].values()))]
    parts = sorted(parts, key=lambda one: -one[1])
    parts += [("rest: Python, torch, freed", facts["rss"] - sum(nbytes for _, nbytes in parts))]
    for at, (name, nbytes) in enumerate(parts):
        color = _BAD if name.startswith("act") else FILLS["rest"].face if name.startswith("rest") else _GOOD
        left.barh(at, nbytes / 1e6, 0.75, color=color)
    left.set_yticks(range(len(parts)), [name for name, _ in parts])
    left.set_ylim(len(parts) - 0.4, -0.6)
    left.set_xlabel(f"resident memory of rank {rank} (MB)")
    left.grid(visible=False, axis="y")
    rows = recording.rows("resource")
    origin = rows["time_ns"].min()
    for one in range(session.world_size):
        own = rows[rows["rank"] == one]
        right.plot((own["time_ns"] - origin) / 1e9, own["rss_bytes"] / 1e6, color=_RANKS[one], marker=".")
    right.set(xlabel="time (s)", ylabel="resident memory (MB)", ylim=0)
    key(
        figure,
        [],
        [Line2D([], [], color=_RANKS[one], marker=".", label=f"rank {one}") for one in range(session.world_size)],
    )
    return figure


_PICTURES: dict[str, Callable[[Session], Picture]] = {
    "verify": draw_verify,
    "nan": draw_nan,
    "diff": draw_diff,
    "twice": draw_twice,
    "memory": draw_memory,
}


def write(figure: Picture, path: Path) -> int:
    """Write a picture with few colours. Return its number of bytes.

    Raises:
        ValueError: it has more than `_MOST_BYTES`.
    """
    image = Image.open(io.BytesIO(figure._repr_png_()[0])).convert("RGBA")
    image.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
    nbytes = path.stat().st_size
    if nbytes > _MOST_BYTES:
        raise ValueError(f"{path} has {nbytes} bytes, more than {_MOST_BYTES}; draw a smaller picture")
    return nbytes


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description="Make the pictures of commands in the guide from real runs.")
    parser.add_argument("folder", type=Path, help="folder of the pictures")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"pages: {', '.join(_PICTURES)} (all)")
    options = parser.parse_args()
    for name in options.names or _PICTURES:
        with ddp_notebook.start(2, gpus="none", quiet_findings=True) as session:
            path = options.folder.resolve() / f"{name}.png"
            print(f"{path}: {write(_PICTURES[name](session), path) / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
