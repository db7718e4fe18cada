"""Objects that collectives belong to: groups of parameters of FSDP, DDP models, and modules of tensor parallel.

An object of FSDP or DDP has the same meaning on each rank that has created it at the same position of the program. The
position is the cell, the lines, and the number of the object in its process group. The guard compares meanings, so it
finds ranks that are in equal collectives for different objects.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup

from ddp_notebook.rank.group.call_site import is_of_user
from ddp_notebook.rank.group.modules import ROOT, Modules
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os, threading, weakref, zlib

HASHES = 0xFFFF  # number of hashes
OBJECT, MODULE = 0, 1  # last bit of a meaning
_MOST = 20_000  # more are not distinguished, as in a program that creates models in a loop


def hash_of(text: str) -> int:
    """Return a hash of 16 bits that is not 0.

    Example:
        >>> 0 < hash_of("all_reduce") < 65536
        True
    """
    return zlib.crc32(text.encode()) % HASHES + 1


class Meaning(NamedTuple):
    """Meaning of the calls of an object in one process group.

    Two ranks that have the same objects in the group have the same checksum.
    """

    bits: int  # 16 bits; 0 if the meaning is unknown
    checksum: int  # checksum of all objects, or of all modules of tensor parallel, that this rank has in the group


_UNKNOWN = Meaning(0, 0)


class _Position(NamedTuple):
    """Position of an object among those of a process group."""

    bits: int
    name: str  # its class with a number


class _Object(NamedTuple):
    """A module whose collectives belong together."""

    module: weakref.ref[torch.nn.Module]
    positions: dict[str, _Position]  # positions by the name of the group


class Identities:
    """Identities of the objects that this process has created. They are numbers of this process, from 1 on.

    Args:
        modules: names of modules.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._counts: Counter[str] = Counter()  # objects by group and position
        self._of_class: Counter[tuple[str, int, str]] = Counter()  # objects by group, cell and class
        self._checksums: defaultdict[str, int] = defaultdict(int)  # checksums of all objects, by group
        self._objects: dict[int, _Object] = {}  # by identity
        self._count = 0  # of all objects
        self._of_modules: dict[str, tuple[int, int]] = {}  # version of the names, and their checksum, by group
        self._adding = threading.Lock()

    def add(self, module: torch.nn.Module, cell: int, groups: Iterable[ProcessGroup], depth: int = 1) -> int:
        """Return the identity of an object that is being created; 0 if there are too many.

        Args:
            module: the module, or the first one.
            cell: number of the running cell. It distinguishes objects if some ranks alone have run an earlier cell.
            groups: process groups of its collectives.
            depth: number of frames to skip, starting with the caller.
        """
        kind = type(module).__name__
        position = f"{cell} {kind} {_lines(sys._getframe(depth))}"
        positions: dict[str, _Position] = {}
        with self._adding:
            if len(self._objects) >= _MOST:
                self._objects = {known: one for known, one in self._objects.items() if one.module() is not None}
                if len(self._objects) >= _MOST:
                    return 0
            for name in {group.group_name for group in groups}:
                count = self._counts[f"{name} {position}"] = self._counts[f"{name} {position}"] + 1
                number = self._of_class[name, cell, kind] = self._of_class[name, cell, kind] + 1
                text = f"{position} {count}"
                self._checksums[name] = zlib.crc32(text.encode(), self._checksums[name])
                positions[name] = _Position(_bits(text, OBJECT), kind if number == 1 else f"{kind} {number}")
            self._count += 1
            self._objects[self._count] = _Object(weakref.ref(module), positions)
            return self._count

    def meaning(self, identity: int, group: str) -> Meaning:
        """Return the meaning of an object's calls in a group.

        Args:
            identity: of the object; 0 if it is unknown.
            group: name of the group.
        """
        known = self._objects.get(identity)
        position = None if known is None else known.positions.get(group)
        return _UNKNOWN if position is None else Meaning(position.bits, self._checksums[group])

    def meaning_of_module(self, name: str, group: str) -> Meaning:
        """Return the meaning of the calls of a module of tensor parallel.

        It is unknown for a model, and if no module is known to have parameters in the group.

        Args:
            name: name of the module in its model.
            group: name of the group.
        """
        if name in ("", ROOT):
            return _UNKNOWN
        version, checksum = self._of_modules.get(group, (-1, 0))
        if version != self._modules.version:
            version = self._modules.version
            checksum = zlib.crc32("\n".join(self._modules.names_in(group)).encode())
            self._of_modules[group] = version, checksum
        return Meaning(_bits(f"module {name}", MODULE), checksum) if checksum else _UNKNOWN

    def name(self, identity: int, group: str, known: str = "") -> str:
        """Return the class of an object, with a number, and its name in a model if that is known.

        Args:
            identity: of the object; 0 if it is unknown.
            group: name of a process group of the object.
            known: its name in the model to which FSDP attributes it; "" if it is that model.
        """
        one = self._objects.get(identity)
        if one is None or (position := one.positions.get(group)) is None:
            return known
        module = one.module()
        if module is not None and not known:
            known = self._modules.known_name(module)
            if known in ("", ROOT) and (model := self._modules.outermost(sys._getframe())) is not None:
                self._modules.index(model)
                known = self._modules.known_name(module)
        return position.name if known in ("", ROOT) else f"{known} ({position.name})"


def _bits(text: str, kind: int) -> int:
    """Return the bits of a meaning: 15 bits of a hash, and the kind."""
    return hash_of(text) & ~1 | kind or 2


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
