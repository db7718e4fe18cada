"""A function is replaced in every module that has it, also in modules that were imported after the search."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ddp_notebook.rank import patching


class Module(ModuleType):
    """A module that records in `looked` when its names are read."""

    looked: list[str] = []

    def __getattribute__(self, name):
        if name == "__dict__":
            Module.looked.append(super().__getattribute__("__name__"))
        return super().__getattribute__(name)


@pytest.fixture
def add(monkeypatch):
    """Return a function that adds a module with these names to `sys.modules`."""

    def add(name: str, **names: object) -> ModuleType:
        module = Module(name)
        for key, value in names.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    monkeypatch.setattr(patching, "_found", {})
    monkeypatch.setattr(patching, "_last", None)
    monkeypatch.setattr(Module, "looked", [])
    return add


@pytest.mark.parametrize("is_looked_for", [True, False])
def test_all_modules_that_have_it_get_the_new_one(add, is_looked_for):
    def original(): ...

    def ours(): ...

    having = [add("one", original=original), add("two", original=original)]
    namesake, renamed, other = add("namesake", original=len), add("renamed", first=original), add("other")
    if is_looked_for:
        patching.look_for([original])
    having.append(add("late", original=original))
    Module.looked.clear()

    patching.replace(original, ours)

    assert [module.original for module in having] == [ours, ours, ours]
    assert namesake.original is len and renamed.first is original and not hasattr(other, "original")
    assert Module.looked == (["late"] if is_looked_for else ["one", "two", "namesake", "renamed", "other", "late"])
