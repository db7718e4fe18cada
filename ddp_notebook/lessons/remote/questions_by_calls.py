"""A network on worker0 that other ranks call: code of puzzle 10/few-calls on each rank.

Only ranks import this module, so it may import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

MOST_QUESTIONS, WIDTH, ANSWERS = 16, 64, 8
_lock = threading.Lock()
_calls: list[int] = []  # on worker0: the calling rank of each call

Ask = Callable[[torch.Tensor], "torch.futures.Future[torch.Tensor]"]


def answer(caller: int, questions: torch.Tensor) -> torch.Tensor:
    """Compute the answers on worker0, and count the call.

    Args:
        caller: Rank that calls.
        questions: (1 to 16, 64).

    Raises:
        ValueError: There are more than 16 questions.
    """
    if not 1 <= len(questions) <= MOST_QUESTIONS:
        raise ValueError(f"a call takes 1 to {MOST_QUESTIONS} questions, got {len(questions)}")
    with _lock:
        _calls.append(caller)
    return questions @ weight()


def weight() -> torch.Tensor:
    """Return the weight of the network: (64, 8)."""
    return torch.randn(WIDTH, ANSWERS, generator=torch.Generator().manual_seed(0))


def asked(solution: Callable[[Ask, torch.Tensor], Any], count: int = 32) -> dict[str, float]:
    """Let every rank but rank 0 ask `count` questions.

    Args:
        solution: Gets a function that calls worker0 and returns a future, and the questions; returns the answers.

    Returns:
        The calls of this rank, and 1 if its answers are right.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _calls.clear()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    is_right = True
    try:
        if rank:
            questions = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(rank))
            answers = solution(lambda some: rpc.rpc_async("worker0", answer, args=(rank, some)), questions)
            is_right = torch.allclose(torch.as_tensor(answers), questions @ weight(), atol=1e-5)
    finally:
        rpc.shutdown()
    box = [list(_calls)]
    dist.broadcast_object_list(box, src=0)
    return {"calls to worker0": float(box[0].count(rank)), "is right": float(is_right)}
