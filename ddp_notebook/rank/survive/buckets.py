"""The buckets of models in DDP, which are the same again when a rank was replaced.

torch makes them anew after the first backward, in the order in which gradients became ready. The reducers that all
ranks get with a new rank would begin with the first order again, and gloo adds the parts of a buffer in different
orders of ranks: with three ranks and more a step would leave other bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_notebook.rank.group.connections import models
from ddp_notebook.rank.group.cpp_log import quiet

Layout = list[list[int]]  # numbers of parameters, by bucket; empty: torch's first one


class Buckets:
    """Of the models in DDP among these modules."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        inside = (one for module in modules for one in module.modules())
        ddp = (one for one in inside if isinstance(one, DistributedDataParallel))
        self._models = [model for model in ddp if getattr(model, "reducer", None) is not None]
        self._known: list[Layout] = [[] for _ in self._models]

    def settle(self) -> None:
        """Let torch make them anew now, on all ranks, where it would in the next forward."""
        for number, model in enumerate(self._models):
            if not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True
            if model._has_rebuilt_buckets and not self._known[number]:
                self._known[number] = _read(model)

    @property
    def known(self) -> list[Layout]:
        """As they are since they were made anew."""
        return self._known

    def make(self, layouts: list[Layout]) -> None:
        """Make new reducers with the buckets that another rank has told."""
        self._known = layouts
        for model, layout in zip(self._models, layouts, strict=True):
            if layout:
                models.make_reducer_anew(model, layout)


_USUAL_RATE = 100  # torch's own: behind a reducer's tenth step a logger learns of its buckets in so many steps once


def _read(model: DistributedDataParallel) -> Layout:
    logger = dist.Logger(model.reducer)  # type: ignore[attr-defined]  # the model's own learns of them a step later
    with quiet():
        model.reducer._set_ddp_runtime_logging_sample_rate(1)
        logger.set_runtime_stats_and_log()
        model.reducer._set_ddp_runtime_logging_sample_rate(_USUAL_RATE)
    order = str(logger._get_ddp_logging_data().strs_map.get("rebuilt_per_bucket_param_indices", ""))
    return [[int(number) for number in one.split()] for one in order.split(",") if one.strip()]
