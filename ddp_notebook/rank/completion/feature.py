"""Feature of a rank that answers completion and help requests of the notebook, even while a cell runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_notebook.messages.completion_messages import DescribeName, ListNames
from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Checked
from ddp_notebook.rank import reserve
from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.rank.completion.description import describe
from ddp_notebook.rank.completion.names import names_at
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.variables.static_lookup import Lookup
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import queue, threading

Request = ListNames | DescribeName


class CompletionFeature(Feature):
    """Thread that lists and describes variables. The agent's thread only puts requests into its queue."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {ListNames: self._put, DescribeName: self._put}

    def _put(self, request: Request) -> bool:
        self._requests.put(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddp-completion", daemon=True)
            reserve.use(self._thread.start)
        return True

    def _run(self) -> None:
        # A second protection: the lookup runs no code of the user, which could start a collective on this rank only.
        self.core.network.recorder.refused_threads.add(threading.get_ident())
        while True:
            request = self._requests.get()
            try:
                facts, error = self._answer(request), ""
            except Exception as caught:  # for example, a cell has replaced a function of a library
                facts, error = {}, with_type(caught)
            self.core.send(Checked(request=request.request, facts=facts, error=error))

    def _answer(self, request: Request) -> dict[str, Any]:
        shell = self.core.shell
        if shell is None:
            return {}
        if isinstance(request, DescribeName):
            found = Lookup(shell.user_ns, request.assigned).find(request.path)
            return {} if found is None else {"text": describe(found, request.path, request.detail)}
        names = names_at(request.kind, request.path, shell.user_ns, shell.user_ns_hidden, request.assigned)
        return {} if names is None else {"names": names}


FEATURE = CompletionFeature
