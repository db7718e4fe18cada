"""Exchange values between the ranks of a comparison, and raise an error on all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_notebook.rank.verify.batches import JoinError
from ddp_notebook.rank.verify.step import StepError

_MOST_CHARS = 200  # maximum length of an error in a sentence


class RefusedError(Exception):
    """The step cannot be compared. All ranks raise it with the same text."""


class Ranks:
    """The ranks of a comparison. All of them must call each method with a collective at the same time.

    Args:
        remedy: returns a sentence to add to an error of the user's code, or "".
    """

    def __init__(self, remedy: Callable[[Exception], str]) -> None:
        self._remedy = remedy
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def any(self, value: object) -> bool:
        """Return whether a value is true on a rank."""
        return any(self.all(bool(value)))

    def attempt(self, call: Callable[[], Any], what: str = "the step failed") -> Any:
        """Return the result of a local call. If it fails on a rank, all ranks raise the error of the first one.

        Args:
            what: clause about a failure.

        Raises:
            RefusedError: the call has failed on a rank.
        """
        result, problem = None, ""
        try:
            result = call()
        except (StepError, JoinError) as error:
            problem = str(error)
        except Exception as error:
            problem = f"{what} with {_words(error)}{self._remedy(error)}"
        problems = self.all(problem)
        failed = [rank for rank, one in enumerate(problems) if one]
        if failed:
            where = "" if len(failed) == self.world else f" (on rank {failed[0]})"
            raise RefusedError(problems[failed[0]] + where)
        return result

    def gather(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the values of all ranks on some ranks, and an empty list on others."""
        found: list[Any] = []
        for rank in ranks:
            gathered: list[Any] | None = [None] * self.world if rank == self.rank else None
            dist.gather_object(value, gathered, rank)
            found = gathered or found
        return found

    def of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that a tensor has on rank 0."""
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(received, 0)
        return received

    @property
    def device(self) -> torch.device:
        """Device on which the collectives of the group work."""
        if "nccl" in dist.get_backend():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {_shortened(lines[0])}" if lines else type(error).__name__


def _shortened(text: str) -> str:
    """Return the first sentences of a text, without the last full stop.

    Example:
        >>> _shortened("The graph is freed. Call it again."), _shortened("A first sentence. " + "word " * 60)
        ('The graph is freed. Call it again', 'A first sentence')
    """
    if len(text) > _MOST_CHARS:
        sentences = text[:_MOST_CHARS].rpartition(". ")[0]
        text = sentences or text[:_MOST_CHARS].rpartition(" ")[0] + " ..."
    return text if text.endswith("...") else text.rstrip(".")
