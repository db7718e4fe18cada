"""The feature of a rank that adds cause and fix to errors of torch: all entries by area, and the search for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddp_notebook.rank.hooks import Feature
from ddp_notebook.rank.torch_errors import (
    c10d,
    c10d_groups,
    checkpoints,
    data_loading,
    ddp,
    dtensor,
    fsdp,
    nccl,
    pipelining,
    raised,
    rpc,
)
from ddp_notebook.rank.torch_errors.known_error import KnownError

_CAUSE: Any = BaseException.__cause__  # attribute access would call a user-defined `__getattribute__`
AREAS = {
    "Collectives and messages": c10d.ENTRIES,
    "Groups, meshes and stores": c10d_groups.ENTRIES,
    "DistributedDataParallel": ddp.ENTRIES,
    "fully_shard": fsdp.ENTRIES,
    "DTensor and tensor parallel": dtensor.ENTRIES,
    "Pipelines": pipelining.ENTRIES,
    "Checkpoints": checkpoints.ENTRIES,
    "RPC": rpc.ENTRIES,
    "DataLoader and samplers": data_loading.ENTRIES,
    "NCCL": nccl.ENTRIES,
}


class TorchErrors(Feature):
    """Translates errors of torch. Torch's own text stays."""

    def explain(self, error: BaseException) -> str:
        return explain(error)


def explain(error: BaseException) -> str:
    """Return cause and fix of an error of torch; "" if the catalogue has no entry that fits.

    The causes of an error (`raise ... from`) are searched too.

    Example:
        >>> import torch
        >>> try:
        ...     torch.utils.data.DataLoader([1], shuffle=True, sampler=[0])
        ... except ValueError as error:
        ...     print(explain(error))
        a sampler already decides the order of the samples: leave shuffle out, and shuffle in the sampler
        >>> explain(ValueError("sampler option is mutually exclusive with shuffle"))
        ''
    """
    for one in _causes(error):
        for facts in raised.find(one):
            for entry in entries():
                if sentence := entry.explain(facts):
                    return sentence
    return ""


def entries() -> Iterator[KnownError]:
    """Yield all entries."""
    for area in AREAS.values():
        yield from area


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    known: list[BaseException] = []
    while error is not None and not any(one is error for one in known):
        known.append(error)
        yield error
        error = _CAUSE.__get__(error)


FEATURE = TorchErrors
