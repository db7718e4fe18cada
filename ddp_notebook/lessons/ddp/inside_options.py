"""Options of `inside_ddp`, shared by the notebook and the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ddp_notebook.errors import UsageError

HOOKS = (None, "fp16", "bf16", "powersgd")
_SWITCHES = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the model and its training. The notebook chooses them and sends them to the ranks.

    `inside.inside_ddp` explains each of them.

    Raises:
        UsageError: The value of an option is invalid.

    Example:
        >>> Options(bucket_cap_mb=1, comm_hook="fp16").name
        'buckets of 1 MB, fp16'
    """

    bucket_cap_mb: float = 25.0
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    no_sync: int = 0
    comm_hook: str | None = None
    powersgd_rank: int = 2
    straggler: int | None = None
    straggler_ms: float = 30.0
    link_mb_s: float | None = None
    compute_ms: float | None = None
    unused: bool = False
    parameter: str | None = None

    def __post_init__(self) -> None:
        if self.comm_hook not in HOOKS:
            names = ", ".join(map(repr, HOOKS))
            raise UsageError(f"comm_hook must be one of {names}, got {self.comm_hook!r}")
        for name in ("bucket_cap_mb", "link_mb_s", "powersgd_rank", "compute_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} must be greater than 0, got {value}")

    def changed(self, changes: Mapping[str, Any], world_size: int) -> Options:
        """Return a copy with some changed options.

        Args:
            changes: Options by name.
            world_size: Number of ranks.

        Raises:
            UsageError: There is no such option, or its value is invalid.
        """
        names = [one.name for one in fields(self)]
        if unknown := set(changes) - set(names):
            raise UsageError(f"unknown option {', '.join(sorted(unknown))}; the options are {', '.join(names)}")
        found = replace(self, **changes)
        if found.straggler is not None and found.straggler not in range(world_size):
            raise UsageError(f"straggler must be a rank from 0 to {world_size - 1}, got {found.straggler}")
        return found

    @property
    def name(self) -> str:
        """Return a text with the size of buckets and all options that differ from the defaults."""
        told = [f"buckets of {self.bucket_cap_mb:g} MB"]
        told += [name for name in _SWITCHES if getattr(self, name)]
        if self.no_sync:
            told.append(f"{self.no_sync} passes in no_sync")
        if self.comm_hook:
            told.append(self.comm_hook + f" rank {self.powersgd_rank}" * (self.comm_hook == "powersgd"))
        if self.straggler is not None:
            told.append(f"rank {self.straggler} {self.straggler_ms:g} ms late")
        if self.compute_ms is not None:
            told.append(f"backward of {self.compute_ms:g} ms")
        if self.link_mb_s is not None:
            told.append(f"link of {self.link_mb_s:g} MB/s")
        return ", ".join(told)
