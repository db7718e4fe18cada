"""Picture of a step of the reader's DDP: the backward, and the transfers that it hides or does not hide."""

from __future__ import annotations

from ddp_notebook.display import INK, Picture, fill_style, key, picture
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.lesson_cells import LessonRunner, running

_RANKS = "ddp_notebook.lessons.capstones.ranks"


def overlap(*names: str) -> Picture:
    """Draw a step of each of your classes of lesson 25, on rank 0.

    Args:
        names: Names of classes on the ranks. Each gets the network and the link, and has a method `finish`.

    Raises:
        UsageError: No name was passed.
        RankError: A class failed.

    Example:
        >>> lessons.overlap("Naive", "Buckets")  # doctest: +SKIP
    """
    if not names:
        raise UsageError('name at least one class: lessons.overlap("Naive")')
    runner = LessonRunner(running())
    steps = {}
    for name in names:
        steps[name] = runner.ask(f"import {_RANKS}\n_lesson_told = {_RANKS}.timeline_of({name})")[0]
    figure, (axes,) = picture(
        "The shortest of three steps, from the beginning of its backward", 1.1 + 0.75 * len(steps)
    )
    for at, step in enumerate(steps.values()):
        axes.barh(at - 0.2, step["backward"], height=0.34, **fill_style("backward"))
        for first, last in step["transfers"]:
            hidden_until = min(max(first, step["backward"]), last)
            for begin, end, meaning in ((first, hidden_until, "hidden"), (hidden_until, last, "exposed")):
                if end > begin:
                    axes.barh(at + 0.2, end - begin, left=begin, height=0.34, **fill_style(meaning))
            axes.plot([last, last], [at + 0.03, at + 0.37], color=INK, linewidth=0.6)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.set_xlabel("milliseconds")
    axes.grid(visible=False, axis="y")
    key(figure, ["backward", "hidden", "exposed"])
    return figure
