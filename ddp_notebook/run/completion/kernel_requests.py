"""Answer the completion and help requests of a kernel for cells of ranks, also while a cell runs.

ipykernel handles these requests in the main thread, which waits while a cell of the ranks runs. From version 7 on, it
reads them in another thread. While a cell runs, this module answers them there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddp_notebook.run.auto import AutoSend
from ddp_notebook.run.completion.answers import Answers
from ddp_notebook.run.completion.rank_code import RankCode, rank_code
from ddp_notebook.run.notebook_kernel import ipython
from ddp_notebook.run.session_hooks import SessionFeature

_log = logging.getLogger(__name__)
_REQUESTS = ("complete_request", "inspect_request")
_HEADER, _CONTENT = 1, 4  # frames of a Jupyter message after the identities


class Completion(SessionFeature):
    """Completion and help in cells of ranks, while a session runs in a Jupyter kernel."""

    _requests: KernelRequests | None = None

    def started(self, *, is_attached: bool) -> None:
        shell = ipython()
        if getattr(shell, "kernel", None) is not None:
            self._requests = KernelRequests(shell, Answers(self.parts.questions, self.parts.liveness))

    def close(self) -> None:
        if self._requests is not None:
            self._requests.remove()
            self._requests = None


class KernelRequests:
    """Answers for a kernel, from now on until `remove`.

    Args:
        shell: the IPython shell of the kernel.
        answers: asks the ranks.
    """

    def __init__(self, shell: Any, answers: Answers) -> None:
        self._shell = shell
        self._kernel = kernel = shell.kernel
        self._answers = answers
        self._complete, self._inspect = kernel.do_complete, kernel.do_inspect
        kernel.do_complete, kernel.do_inspect = self.do_complete, self.do_inspect
        self._channel = getattr(kernel, "shell_channel_thread", None)  # None before ipykernel 7
        self._threads: ThreadPoolExecutor | None = None
        if self._channel is not None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="ddp-completion")
            self._channel.io_loop.add_callback(kernel.shell_stream.on_recv, self._on_message, copy=False)

    def remove(self) -> None:
        """Let the kernel answer all requests itself again."""
        self._kernel.do_complete, self._kernel.do_inspect = self._complete, self._inspect
        if self._channel is not None and self._threads is not None:
            main = self._kernel.shell_channel_thread_main
            self._channel.io_loop.add_callback(self._kernel.shell_stream.on_recv, main, copy=False)
            self._threads.shutdown(wait=False)

    # ---- the main thread

    def do_complete(self, code: str, cursor_pos: int | None) -> Any:
        """Return the content of a `complete_reply`, see `Kernel.do_complete`."""
        position = len(code) if cursor_pos is None else cursor_pos
        if (at := self._rank_code(code, position)) is not None:
            content = self._answers.complete(code, position, at)
            if content is not None:
                return content
        return self._complete(code, cursor_pos)

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Return the content of an `inspect_reply`, see `Kernel.do_inspect`."""
        if (at := self._rank_code(code, cursor_pos)) is not None:
            return self._answers.inspect(code, cursor_pos, at, detail_level)
        return self._inspect(code, cursor_pos, detail_level, omit_sections)

    def _rank_code(self, code: str, position: int) -> RankCode | None:
        return rank_code(code, position, is_auto=AutoSend.of(self._shell).sends(code))

    # ---- the thread that reads the shell channel

    async def _on_message(self, frames: Any) -> None:
        if self._runs_cell and (request := self._read(frames)) is not None:
            try:
                kind, content = request
                loop = asyncio.get_running_loop()
                reply = await loop.run_in_executor(self._threads, self._reply, kind, content)
                if reply is not None:
                    self._send(frames, kind.replace("request", "reply"), reply)
                    return
            except Exception:
                _log.exception("a request for completion was left to the kernel")
        await self._kernel.shell_channel_thread_main(frames)

    @property
    def _runs_cell(self) -> bool:
        """Return whether the main thread runs a cell, so that it cannot answer now."""
        return self._shell.displayhook.exec_result is not None

    def _read(self, frames: Any) -> tuple[str, dict[str, Any]] | None:
        """Return the kind and content of a request, without a check of its signature; None for other messages."""
        session = self._kernel.session
        _, message = session.feed_identities(frames, copy=False)
        kind = session.unpack(message[_HEADER].bytes)["msg_type"]
        return (kind, session.unpack(message[_CONTENT].bytes)) if kind in _REQUESTS else None

    def _reply(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the content of the reply; None if only the kernel can answer, after the cell."""
        code = content["code"]
        position = content.get("cursor_pos")
        position = len(code) if position is None else position
        if (at := self._rank_code(code, position)) is None:
            return None
        if kind == "inspect_request":
            return self._answers.inspect(code, position, at, content.get("detail_level", 0))
        return self._answers.complete(code, position, at)

    def _send(self, frames: Any, kind: str, reply: dict[str, Any]) -> None:
        """Send a reply, and the status messages that a front end expects with it.

        JupyterLab shows the reply only after an idle status for its request. But it takes any status for that of the
        kernel, so a busy status follows while the cell runs.
        """
        session = self._kernel.session
        idents, message = session.feed_identities(frames, copy=False)
        request = session.deserialize(message, content=True, copy=False)  # checks the signature, which works once
        self._publish("busy", request)
        session.send(self._kernel.shell_stream, kind, reply, request, ident=idents)
        self._publish("idle", request)
        self._publish("busy", request)
        if not self._runs_cell:  # it has ended: its own idle status may have come before the last busy
            self._publish("idle", request)

    def _publish(self, status: str, request: Any) -> None:
        self._kernel.session.send(self._kernel.iopub_socket, "status", {"execution_state": status}, request)
