"""Resize feature of a rank: reports obstacles to a resize, and joins the group of the new size."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Checked, Pulled
from ddp_notebook.messages.resize_messages import Inspect, Resized
from ddp_notebook.rank.cell.exceptions import with_type
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.hooks import Feature
from ddp_notebook.rank.resize import resize_requests
from ddp_notebook.stdlib import json


class ResizeFeature(Feature):
    """Handlers of `%ddp_resize` on a rank."""

    def questions(self) -> Mapping[type[Message], Callable[[Any], Coroutine[Any, Any, None]]]:
        return {Inspect: self._inspect, Resized: self._settle}

    async def _inspect(self, message: Inspect) -> None:
        shell = self.core.shell
        try:
            facts = unseen(resize_requests.inspect, message, shell.user_ns, shell.user_ns_hidden)
        except (Exception, SystemExit) as error:  # from an object of the user
            self.core.send(Checked(request=message.request, error=with_type(error)))
        else:
            self.core.send(Checked(request=message.request, facts=facts))

    async def _settle(self, message: Resized) -> None:
        place = self.core.place()
        assert place is not None
        try:
            done = unseen(resize_requests.settle, message, place, self.core.shell.user_ns)
        except (Exception, SystemExit) as error:  # from an object of the user, or because another rank has died
            self.core.send(Pulled(request=message.request, error=with_type(error)))
        else:
            self.core.send(Pulled(request=message.request, about=json.dumps(done)))


FEATURE = ResizeFeature
