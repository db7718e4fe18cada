"""Measures for the puzzles of the capstones, from numbers that their code on the ranks logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddp_notebook.lessons.questions.measures import Attempt, Measure


def _logged(name: str) -> Callable[[Attempt], Mapping[int, float]]:
    """Return a function with the last logged number of each rank."""

    def last(attempt: Attempt) -> Mapping[int, float]:
        metric = attempt.recording.metrics.get(name)
        if metric is None:
            return {}
        found = {rank: metric.of_rank(rank)[1] for rank in attempt.ranks}
        return {rank: float(values[-1]) for rank, values in found.items() if len(values)}

    return last


EXPOSED = Measure(
    name="exposed time",
    of=_logged("exposed"),
    in_words=lambda value: f"{value:.2f} times the time of the transfer",
)
TOKENS_PER_S = Measure(
    name="speed", of=_logged("tokens_per_s"), in_words=lambda value: f"{value:,.0f} tokens per second"
)
FULLEST = Measure(name="fullest reader", of=_logged("fullest"), in_words=lambda value: f"{value:.2f} times the mean")
