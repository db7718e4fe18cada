"""Feature of a rank that lists its variables: between two cells with digests, while a cell runs without."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import torch

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Checked
from ddp_notebook.messages.whos_messages import ListVariables, ReadVariables
from ddp_notebook.rank import reserve
from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.hooks import Feature
from ddp_notebook.rank.whos.digests import Digests
from ddp_notebook.rank.whos.rows import Rows
from ddp_notebook.records import logs
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import threading


class WhosFeature(Feature):
    """Handlers of `%ddp_whos` on a rank."""

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {ListVariables: self._list}

    def questions(self) -> Mapping[type[Message], Callable[[Any], Coroutine[Any, Any, None]]]:
        return {ReadVariables: self._read}

    def _list(self, message: ListVariables) -> bool:
        """Answer in a thread: many variables would delay the messages of the agent's thread."""
        thread = threading.Thread(target=self._answer, args=(message, Rows(None)), name="ddp-whos", daemon=True)
        reserve.use(thread.start)
        return True

    async def _read(self, message: ReadVariables) -> None:
        unseen(self._answer, message, Rows(Digests(message.exact)))

    def _answer(self, message: ListVariables | ReadVariables, rows: Rows) -> None:
        shell = self.core.shell
        try:
            with torch.no_grad():
                facts = rows.of(shell.user_ns, message.pattern, self._hidden())
        except Exception as error:  # for example, a cell has replaced a function of torch
            self.core.send(Checked(request=message.request, error=with_type(error)))
        else:
            self.core.send(Checked(request=message.request, facts=facts))

    def _hidden(self) -> set[str]:
        """Return the names of IPython, and those of this package whose values the user has not changed."""
        shell, place = self.core.shell, self.core.place()
        hidden = {name for name in shell.user_ns_hidden if type(name) is str}
        if place is not None:
            ours = {name: getattr(place, name) for name in ("rank", "local_rank", "world_size")}
            for name, value in ours.items():
                if type(shell.user_ns.get(name)) is int and shell.user_ns[name] == value:
                    hidden.add(name)
            device = shell.user_ns.get("device")
            if type(device) is torch.device and device == torch.device(place.device):
                hidden.add("device")
        return hidden | {name for name in ("log",) if logs.is_log(shell.user_ns.get(name))}


FEATURE = WhosFeature
