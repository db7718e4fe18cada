"""Objects that collectives belong to: groups of parameters of FSDP, and DDP models.

An object has the same identity on each rank that has created it at the same position of the program: in the same cell,
by the same lines, as the n-th object of its class. The guard compares identities, so it finds ranks that are in equal
collectives for different objects.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Collection
from types import FrameType
from typing import NamedTuple

import torch

from ddp_notebook.rank.group.call_site import is_of_user
from ddp_notebook.rank.group.modules import ROOT, Modules
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os, threading, weakref

HASHES = 0xFFFF  # number of identities
_MOST = 20_000  # more are not distinguished, as in a program that creates models in a loop


def hash_of(text: str) -> int:
    """Return a hash of 16 bits that is not 0.

    Example:
        >>> 0 < hash_of("all_reduce") < 65536
        True
    """
    return zlib.crc32(text.encode()) % HASHES + 1


class _Named(NamedTuple):
    """A module, and its class with a number."""

    module: weakref.ref[torch.nn.Module]
    name: str


class Identities:
    """Identities of the objects that this process has created.

    Args:
        modules: names of modules.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._counts: Counter[str] = Counter()  # objects by position
        self._of_class: Counter[tuple[int, str]] = Counter()  # objects by cell and class
        self._named: dict[int, _Named] = {}
        self._of_names: dict[str, int] = {}
        self._adding = threading.Lock()

    def add(self, module: torch.nn.Module, cell: int, depth: int = 1) -> int:
        """Return the identity of an object that is being created.

        Args:
            module: the module, or the first one.
            cell: number of the running cell. It distinguishes objects if some ranks alone have run an earlier cell.
            depth: number of frames to skip, starting with the caller.
        """
        kind = type(module).__name__
        position = f"{cell} {kind} {_lines(sys._getframe(depth))}"
        with self._adding:
            if len(self._named) >= _MOST:
                self._named = {known: one for known, one in self._named.items() if one.module() is not None}
                if len(self._named) >= _MOST:
                    return 0
            count = self._counts[position] = self._counts[position] + 1
            number = self._of_class[cell, kind] = self._of_class[cell, kind] + 1
            identity = hash_of(f"{position} {count}")
            if (other := self._named.get(identity)) is not None and other.module() is not None:
                return 0  # the same hash: the later object is not known
            self._named[identity] = _Named(weakref.ref(module), kind if number == 1 else f"{kind} {number}")
        return identity

    def of_name(self, name: str) -> int:
        """Return the identity of a module of tensor parallel, by its name in the model; 0 if it is the model itself."""
        if (known := self._of_names.get(name)) is None:
            known = self._of_names[name] = 0 if name in ("", ROOT) else hash_of(f"module {name}")
        return known

    @property
    def all(self) -> Collection[int]:
        """Return the identities of all objects, and of the modules of all known models."""
        return [*self._named, *filter(None, map(self.of_name, self._modules.known_names))]

    def name(self, identity: int, known: str = "") -> str:
        """Return the class of an object, with a number, and its name in a model if that is known.

        Args:
            known: its name in the model to which FSDP attributes it; "" if it is that model.
        """
        if (named := self._named.get(identity)) is None:
            return known
        module = named.module()
        if module is not None and not known:
            known = self._modules.known_name(module)
            if known in ("", ROOT) and (model := self._modules.outermost(sys._getframe())) is not None:
                self._modules.index(model)
                known = self._modules.known_name(module)
        return named.name if known in ("", ROOT) else f"{known} ({named.name})"


def _lines(frame: FrameType | None) -> str:
    """Return the lines of the user's functions on the stack, innermost first."""
    lines = []
    while frame is not None:
        if is_of_user(frame):
            lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}:{frame.f_lineno}")
            if frame.f_code.co_name == "<module>":
                break
        frame = frame.f_back
    return " ".join(lines)
