"""What a cell records beside what is always recorded, as the notebook asks for it and a rank reads it; and the path of
the profile that torch's profiler leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

LEVELS = ("off", "meta", "values", "all")
PROFILES = "profile-*-*.json"  # what the files are called that `profile_path` names


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """How much one cell records.

    Args:
        level: "off", "meta" (no values of tensors), "values" (of a training loop that is fast those of some steps) or
            "all"; "": as the session is set, see `Session.record`.
        full_bytes: tensors of up to so many bytes are kept whole; 0: a preview of each.
        watch: names of variables that are read after each optimizer step.
        gradient: name of a parameter in DDP whose gradient is kept, local and averaged; "": none.
        profile: run torch's profiler.
        profiles: the folder that its profile goes to. The session sets it.
        solo: optimizer steps and seconds after which the cell is ended, which runs on one rank alone, without
            communication; None: it runs as it is.

    Example:
        >>> RecordOptions(level="meta", watch=["loss"])
        RecordOptions(level='meta', full_bytes=0, watch=('loss',), gradient='', profile=False, profiles='', solo=None)
    """

    level: str = ""
    full_bytes: int = 0
    watch: tuple[str, ...] = ()
    gradient: str = ""
    profile: bool = False
    profiles: str = ""
    solo: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "watch", tuple(self.watch))  # JSON has lists only
        if self.solo is not None:
            steps, seconds = self.solo
            object.__setattr__(self, "solo", (steps, seconds))

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults: nothing, for most cells."""
        return {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> RecordOptions:
        """What `to_json` has made this of.

        Raises:
            TypeError, ValueError: it was none.
        """
        return cls(**given) if given != {} else _USUAL


_USUAL = RecordOptions()  # of most cells
_DEFAULTS = {one.name: one.default for one in fields(RecordOptions)}


def profile_path(folder: str, cell: int, rank: int) -> Path:
    """Where the profile of a cell on a rank lies.

    Example:
        >>> profile_path("/tmp/session", 7, 0).name
        'profile-7-0.json'
    """
    return Path(folder) / f"profile-{cell}-{rank}.json"


def profile_of(path: Path) -> tuple[int, int]:
    """The cell and the rank of a profile.

    Example:
        >>> profile_of(profile_path("/tmp/session", 7, 0))
        (7, 0)
    """
    cell, rank = (int(word) for word in path.stem.split("-")[1:])
    return cell, rank
