"""Recording options of one cell, set by the notebook and read by a rank, and the paths of its profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

LEVELS = ("off", "meta", "values", "all")
PROFILES = "profile-*-*.json"  # glob pattern of the files of `profile_path`


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Recording options of one cell.

    Args:
        level: "off", "meta" (without tensor values), "values" (tensor values; fast training loops are sampled) or
            "all". "" uses the setting of the session, see `Session.record`.
        full_bytes: tensors up to this size are recorded completely; 0 to record only a preview.
        watch: names of variables that are read after each optimizer step.
        gradient: name of a parameter in DDP whose local and averaged gradients are recorded; "" for none.
        profile: whether to run torch's profiler.
        profiles: folder of the profile. The session sets it.
        solo: for a baseline run on one rank without communication: the number of optimizer steps and of seconds after
            which the cell is ended. None for a normal run.
        catch_nan: stop the cell before an optimizer step whose gradients are NaN or infinite, see `Session.catch_nan`.

    Example:
        >>> RecordOptions(level="meta", watch=["loss"])  # doctest: +ELLIPSIS
        RecordOptions(level='meta', full_bytes=0, watch=('loss',), gradient='', profile=False, ... catch_nan=False)
    """

    level: str = ""
    full_bytes: int = 0
    watch: tuple[str, ...] = ()
    gradient: str = ""
    profile: bool = False
    profiles: str = ""
    solo: tuple[int, float] | None = None
    catch_nan: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "watch", tuple(self.watch))  # JSON has no tuples
        if self.solo is not None:
            steps, seconds = self.solo
            object.__setattr__(self, "solo", (steps, seconds))

    def to_json(self) -> dict[str, Any]:
        """Return the options that differ from the defaults. Most cells have none."""
        return {name: value for name, default in _DEFAULTS.items() if (value := getattr(self, name)) != default}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> RecordOptions:
        """Return the options of `to_json`.

        Raises:
            TypeError, ValueError: the JSON does not contain options.
        """
        return cls(**given) if given != {} else _USUAL


_USUAL = RecordOptions()  # shared by most cells
_DEFAULTS = {one.name: one.default for one in fields(RecordOptions)}


def profile_path(folder: str, cell: int, rank: int) -> Path:
    """Return the path of the profile of a cell on a rank.

    Example:
        >>> profile_path("/tmp/session", 7, 0).name
        'profile-7-0.json'
    """
    return Path(folder) / f"profile-{cell}-{rank}.json"


def profile_of(path: Path) -> tuple[int, int]:
    """Return the cell and the rank of a profile from its path.

    Example:
        >>> profile_of(profile_path("/tmp/session", 7, 0))
        (7, 0)
    """
    cell, rank = (int(word) for word in path.stem.split("-")[1:])
    return cell, rank
