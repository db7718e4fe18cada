"""Copies of standard library modules that code in cells cannot change.

A cell shares its process with this package. It may replace `time.perf_counter`, freeze the clocks, or make `os.write`
raise an error. The end of the cell must still reach the notebook. So the code of a rank calls the functions that these
modules had when they were first imported through this module:

    from ddp_notebook.stdlib import os, time

`sys` is not copied, because its present state is needed. A test checks that `rank`, `wire` and `records` import these
modules from this one.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio as asyncio
    import base64 as base64
    import contextlib as contextlib
    import ctypes as ctypes
    import errno as errno
    import faulthandler as faulthandler
    import fcntl as fcntl
    import functools as functools
    import gc as gc
    import hashlib as hashlib
    import hmac as hmac
    import io as io
    import itertools as itertools
    import json as json
    import logging as logging
    import math as math
    import mmap as mmap
    import os as os
    import pickle as pickle
    import queue as queue
    import re as re
    import resource as resource
    import secrets as secrets
    import select as select
    import signal as signal
    import socket as socket
    import stat as stat
    import struct as struct
    import threading as threading
    import time as time
    import traceback as traceback
    import weakref as weakref
    import zlib as zlib

# Builtins of Python. A module that imports them as `__builtins__` is safe from changes that a cell makes to `builtins`.
BUILTINS = dict(vars(builtins))
COPIED = {
    *(
        "asyncio",
        "base64",
        "contextlib",
        "ctypes",
        "faulthandler",
        "fcntl",
        "functools",
        "gc",
        "io",
        "itertools",
        "json",
    ),
    *("logging", "math", "os", "pickle", "queue", "re", "signal", "socket", "struct", "threading", "time", "traceback"),
    *("errno", "hashlib", "hmac", "mmap", "resource", "secrets", "select", "stat", "weakref", "zlib"),
}
# These classes have methods in Python, which a cell may replace. The copies have their own, as subclasses. The
# functions return objects of these classes.
OWN = {
    "queue": ("Queue",),
    "socket": ("socket", "socketpair", "create_connection", "create_server"),
    "threading": ("Condition", "Event", "main_thread"),
}
_OF_A_CLASS = {"__dict__", "__weakref__", "__slots__", "__new__", "_io_refs", "_closed"}
# Classes and functions of these modules use public names of their module: `WeakKeyDictionary` uses `weakref.ref`. So a
# copy of their names is not enough, and they are executed a second time. They share no state.
EXECUTED = {"traceback", "weakref"}


def __getattr__(name: str) -> ModuleType:
    """Copy a module at its first import through this module."""
    if name not in COPIED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    original = importlib.import_module(name)
    if name in EXECUTED:
        copied = _executed_again(original)
    else:
        copied = ModuleType(name, original.__doc__)
        vars(copied).update(vars(original))
        _copy_classes(copied, original)
    if name == "os":
        copied.path = _path_of(copied)  # type: ignore[attr-defined]
    setattr(sys.modules[__name__], name, copied)
    return copied


def _copy_classes(copied: ModuleType, original: ModuleType) -> None:
    """Give a copied module its own classes and functions of `OWN`, which use the names of the copy."""
    if original.__name__ == "queue":
        copied.threading = sys.modules[__name__].threading  # type: ignore[attr-defined]
    for name in OWN.get(original.__name__, ()):
        value = vars(original)[name]
        if isinstance(value, FunctionType):
            setattr(copied, name, _with_names_of(copied, value))
        else:
            bases = reversed(value.__mro__[:-1])  # an attribute of a class hides those of its base classes
            members = {key: one for base in bases for key, one in vars(base).items() if key not in _OF_A_CLASS}
            functions = {key: _with_names_of(copied, one) for key, one in members.items() if type(one) is FunctionType}
            setattr(copied, name, type(name, (value,), {**members, **functions, "__slots__": ()}))


def _with_names_of(module: ModuleType, function: FunctionType) -> FunctionType:
    """Return a copy of a function that uses the names of another module."""
    names, defaults = vars(module), function.__defaults__
    copied = FunctionType(function.__code__, names, function.__name__, defaults, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _executed_again(module: ModuleType) -> ModuleType:
    assert module.__spec__ is not None and module.__spec__.loader is not None
    copied = importlib.util.module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(copied)
    return copied


def _path_of(copied_os: ModuleType) -> ModuleType:
    """Return a copy of `os.path` whose functions use this copy of `os`: `exists` calls `os.stat`."""
    generic, path = importlib.import_module("genericpath"), _executed_again(copied_os.path)
    own = _executed_again(generic)
    own.os = path.os = copied_os  # type: ignore[attr-defined]
    own.stat = path.stat = sys.modules[__name__].stat  # type: ignore[attr-defined]
    path.genericpath = own  # type: ignore[attr-defined]
    vars(path).update({name: vars(own)[name] for name in generic.__all__ if vars(path)[name] is vars(generic)[name]})
    return path
