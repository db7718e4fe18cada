"""A real notebook kernel, controlled like a front end does it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def _client_of(connection_file: str) -> BlockingKernelClient:
    client = BlockingKernelClient(connection_file=connection_file)
    client.load_connection_file()
    return client


@dataclass
class Reply:
    """Output and status of a cell."""

    status: str = ""
    ename: str = ""
    evalue: str = ""
    stdout: str = ""
    stderr: str = ""
    traceback: str = ""
    displays: list[dict[str, Any]] = field(default_factory=list)
    duration_s: float = 0.0
    # outputs that a front end shows now: (name, content), in order
    shown: list[tuple[str, Any]] = field(default_factory=list)
    updates: dict[str, dict[str, Any]] = field(default_factory=dict)  # data of display updates, by id
    messages: int = 0  # number on iopub
    nbytes: int = 0  # bytes of their texts
    _clears: bool = False  # clear the output before the next one

    def read(self, message: dict[str, Any]) -> None:
        """Handle a message of iopub like a front end."""
        kind, content = message["msg_type"], message["content"]
        if self._clears and kind in ("stream", "error", "display_data", "execute_result"):
            self._clears = False
            self.shown.clear()
        self.messages += 1
        if kind == "stream":
            self.nbytes += len(content["text"])
            if self.shown and self.shown[-1][0] == content["name"]:
                self.shown[-1] = (content["name"], self.shown[-1][1] + content["text"])
            else:
                self.shown.append((content["name"], content["text"]))
        elif kind == "error":
            self.traceback = _ANSI.sub("", "\n".join(content["traceback"]))
        elif kind == "clear_output":
            self._clears = content["wait"]
            if not content["wait"]:
                self.shown.clear()
        elif kind == "update_display_data":
            display_id = content["transient"]["display_id"]
            self.updates[display_id] = content["data"]
            for name, shown in self.shown:
                if name == "display" and (shown.get("transient") or {}).get("display_id") == display_id:
                    shown["data"] = content["data"]
        elif "data" in content and kind in ("display_data", "execute_result"):
            self.shown.append(("display", content))
        texts = {"stdout": "", "stderr": ""}
        self.displays = []
        for name, shown in self.shown:
            if name != "display":
                texts[name] += shown
            elif (
                set(shown["data"]) == {"text/plain"} and shown.get("transient", {}).get("display_id", "")[:4] == "ddp-"
            ):
                texts["stdout"] += shown["data"]["text/plain"] + "\n"  # lines that can be updated
            else:
                self.displays.append(shown["data"])
        self.stdout, self.stderr = texts["stdout"], texts["stderr"]


class NotebookKernel:
    """An ipykernel process started here, or one that a server has started (`connection_file` and `pid`).

    Args:
        pythonpath: Packages that precede the installed ones, such as an older ipykernel.
        python: Interpreter of another environment.
        cwd: Working directory of the kernel.
    """

    def __init__(
        self,
        env: Mapping[str, str] | None = None,
        pythonpath: str = "",
        connection_file: str = "",
        pid: int = 0,
        python: str = sys.executable,
        cwd: str | None = None,
    ) -> None:
        self._python = python
        self._cwd = cwd
        self._replies: dict[str, Reply] = {}  # replies of cells by message id
        self.manager: KernelManager | None = None
        self.pid = pid

        def make() -> BlockingKernelClient:
            return _client_of(connection_file) if connection_file else self._launch(env, pythonpath)

        self.client = make()
        try:
            self._connect()
        except RuntimeError:
            # Its ports were chosen before they were bound, and another process took one. Or the kernel imported for
            # more than a second, and jupyter_client considered it dead.
            self.close()
            self.client = make()
            self._connect()

    def _connect(self) -> None:
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def _launch(self, env: Mapping[str, str] | None, pythonpath: str) -> BlockingKernelClient:
        environment = {**os.environ, **(env or {})}
        if pythonpath:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [pythonpath, environment.get("PYTHONPATH", "")]))
        self.manager = KernelManager(kernel_name="python3")
        assert self.manager.kernel_spec is not None
        self.manager.kernel_spec.argv[0] = self._python
        self.manager.start_kernel(env=environment, cwd=self._cwd)
        self.pid = self.manager.provisioner.process.pid  # type: ignore[union-attr]  # a local process
        return self.manager.client()

    def start(self, code: str) -> str:
        """Send a cell without waiting for it. Return its message id."""
        return self.client.execute(code)

    def wait_for_text(self, text: str, timeout_s: float = 30.0) -> str:
        """Read the output of the cell until it contains `text`. Return the output so far."""
        reply, until = Reply(), time.monotonic() + timeout_s
        while text not in reply.stdout + reply.stderr:
            reply.read(self.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic())))
        return reply.stdout + reply.stderr

    def finish(self, message_id: str, timeout_s: float = 60.0) -> Reply:
        """Wait until a cell has ended, and return all its output."""
        reply = self._replies.setdefault(message_id, Reply())
        started, until = time.monotonic(), time.monotonic() + timeout_s
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell did not end in {timeout_s:g} s; so far: {reply}") from None
            if message["parent_header"].get("msg_id") != message_id:
                self._read_of_another(message)
                continue
            reply.read(message)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        while True:
            answer = self.client.get_shell_msg(timeout=max(0.1, until - time.monotonic()))
            if answer["parent_header"].get("msg_id") == message_id:
                break
        reply.status = answer["content"]["status"]
        reply.ename, reply.evalue = answer["content"].get("ename", ""), answer["content"].get("evalue", "")
        reply.duration_s = time.monotonic() - started
        return reply

    def _read_of_another(self, message: dict[str, Any]) -> None:
        self._replies.setdefault(message["parent_header"].get("msg_id", ""), Reply()).read(message)

    def wait_under(self, message_id: str, is_there: Callable[[Reply], bool], timeout_s: float = 30.0) -> Reply:
        """Read output of a cell, even a finished one, until a condition is met. Return all output of the cell."""
        reply, until = self._replies.setdefault(message_id, Reply()), time.monotonic() + timeout_s
        while not is_there(reply):
            try:
                self._read_of_another(self.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic())))
            except queue.Empty:
                raise TimeoutError(f"not within {timeout_s:g} s; under that cell is {reply}") from None
        return reply

    def run(self, code: str, timeout_s: float = 60.0) -> Reply:
        """Run a cell to its end.

        An older ipykernel aborts a cell that arrives immediately after a failed one, as if it had been queued. Then the
        cell is sent again.
        """
        reply = self.finish(self.start(code), timeout_s)
        return self.finish(self.start(code), timeout_s) if reply.status == "aborted" else reply

    def let_lines_wait(self, wait_s: float = 3.0) -> None:
        """Let lines with numbers, values and displays wait longer than usual for those of other ranks.

        On a busy machine a rank may be late by more than the usual half second, and then has a line of its own.
        """
        code = f"__import__('ddp_notebook.run.output.fold', fromlist=['OTHERS_S']).OTHERS_S = {wait_s}"
        self.finish(self.client.execute(code, silent=True))

    def interrupt(self) -> None:
        """Interrupt the kernel, like the stop button."""
        assert self.manager is not None
        self.manager.interrupt_kernel()

    def signal_below(self, number: int) -> list[psutil.Process]:
        """Send a signal to every process below the kernel. Return the processes that have received it."""
        got = []
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                got.append(process)
        return got

    def interrupt_in_vscode(self) -> list[psutil.Process]:
        """Interrupt like the stop button of VS Code: SIGINT to every process below the kernel, then to the kernel.

        Returns the processes below the kernel.

        Source: `KernelProcess.interrupt` of vscode-jupyter, since
        https://github.com/microsoft/vscode-jupyter/pull/16319
        """
        got = self.signal_below(signal.SIGINT)
        os.kill(self.pid, signal.SIGINT)
        return got

    def close(self) -> None:
        """Shut down like a front end. Idempotent."""
        self.client.stop_channels()
        if self.manager is not None and self.manager.has_kernel:
            self.manager.shutdown_kernel()
        self.client.context.destroy(linger=0)


def first_line_of_stderr(kernel: NotebookKernel, timeout_s: float) -> str:
    """Return the first line that the running cell writes to stderr, or "" after this time."""
    text, until = "", time.monotonic() + timeout_s
    with contextlib.suppress(queue.Empty):
        while "\n" not in text:
            message = kernel.client.get_iopub_msg(timeout=max(0.01, until - time.monotonic()))
            if message["msg_type"] == "stream" and message["content"]["name"] == "stderr":
                text += message["content"]["text"]
    return text
