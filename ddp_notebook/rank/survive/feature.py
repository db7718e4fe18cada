"""Survive feature of a rank: a training loop continues after other ranks have died (`ddp_notebook.survive`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Form, RunCell
from ddp_notebook.messages.survive_messages import Resume, Save
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.survive.survival import RankSurvival


class SurviveFeature(Feature):
    """Training loops that continue after the death of a rank."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._survival = RankSurvival(core)

    def cell_begins(self, cell: RunCell) -> None:
        self._survival.missing = cell.missing

    def cell_code(self, code: str) -> str:
        return self._survival.prepare(code)

    def ranks_lost(self) -> None:
        self._survival.on_lost()

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {Save: self._survival.save, Resume: self._survival.resume, Form: self._survival.reform}

    def in_main_thread(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {Resume: self._survival.rejoin}


FEATURE = SurviveFeature
