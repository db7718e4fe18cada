"""The debugger of a front end, which sends requests to a kernel like JupyterLab."""

from __future__ import annotations

import queue
import re
import time
from typing import Any

from tests.kernels import NotebookKernel, Reply

_OF_CELL = re.compile(r"<cell line: \d+>")


class FrontEndDebugger:
    """Debugger of a front end.

    Args:
        kernel: the notebook.
    """

    def __init__(self, kernel: NotebookKernel) -> None:
        self.kernel = kernel
        self.took_ms: dict[str, list[float]] = {}  # durations of requests, by command
        self.events: list[dict[str, Any]] = []  # events that were not awaited yet
        self.all_events: list[dict[str, Any]] = []
        self.output: list[dict[str, Any]] = []  # other messages on iopub
        self._seq = 0

    def send(self, command: str, **arguments: Any) -> str:
        """Send a request. Return the id of its message."""
        self._seq += 1
        client = self.kernel.client
        content = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        message = client.session.msg("debug_request", content)
        client.control_channel.send(message)
        return str(message["header"]["msg_id"])

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, and return its response."""
        began = time.perf_counter()
        message = self.send(command, **arguments)
        while True:
            reply = self.kernel.client.get_control_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == message:
                self.took_ms.setdefault(command, []).append((time.perf_counter() - began) * 1e3)
                found: dict[str, Any] = reply["content"]
                return found

    def start(self) -> None:
        """Switch the debugger on."""
        assert self.ask("initialize", clientID="jupyterlab", adapterID="", pathFormat="path")["success"]
        assert self.ask("attach")["success"]

    def stop(self) -> None:
        """Switch the debugger off."""
        self.ask("disconnect", restart=False, terminateDebuggee=False)

    def set_breakpoints(self, code: str, *lines: int, **more: Any) -> list[dict[str, Any]]:
        """Set breakpoints in a cell, and return them as the kernel has set them.

        Args:
            more: further fields of the breakpoints, such as `condition`.
        """
        path = self.ask("dumpCell", code=code)["body"]["sourcePath"]
        breakpoints = [{"line": line, **more} for line in lines]
        reply = self.ask("setBreakpoints", source={"path": path}, breakpoints=breakpoints, sourceModified=False)
        self.ask("configurationDone")
        found: list[dict[str, Any]] = reply["body"]["breakpoints"]
        return found

    def wait_for(self, event: str, count: int = 1, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """Return the bodies of the next events of a kind, without repetitions for one thread.

        Args:
            count: number of threads.
        """
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + timeout_s
        while len(found) < count:
            for one in [one for one in self.events if one["event"] == event]:
                self.events.remove(one)
                found[one["body"]["threadId"]] = one["body"]
            if len(found) < count and not self._read(until - time.monotonic()):
                shown = [one["content"] for one in self.output if one["msg_type"] in ("stream", "error")]
                raise TimeoutError(f"{len(found)} of {count} events {event!r} after {timeout_s:g} s: {shown}")
        return [found[thread] for thread in sorted(found)]

    def read(self, seconds: float) -> None:
        """Read messages for some time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._read(left)

    def has_ended(self, cell: str) -> bool:
        """Return whether the output of a cell that was read contains its end."""
        return any(
            one["parent_header"].get("msg_id") == cell and one["content"].get("execution_state") == "idle"
            for one in self.output
        )

    def finish(self, cell: str, timeout_s: float = 30.0) -> Reply:
        """Wait until a cell has ended, and return all its output."""
        reply, until = Reply(), time.monotonic() + timeout_s
        while True:
            for message in [one for one in self.output if one["parent_header"].get("msg_id") == cell]:
                self.output.remove(message)
                reply.read(message)
                if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                    return self._with_result(reply, cell, until)
            if not self._read(until - time.monotonic()):
                raise TimeoutError(f"the cell did not end in {timeout_s:g} s; so far: {reply}")

    def _with_result(self, reply: Reply, cell: str, until: float) -> Reply:
        while True:
            answer = self.kernel.client.get_shell_msg(timeout=max(0.1, until - time.monotonic()))
            if answer["parent_header"].get("msg_id") == cell:
                reply.status = answer["content"]["status"]
                reply.ename, reply.evalue = answer["content"].get("ename", ""), answer["content"].get("evalue", "")
                return reply

    def _read(self, timeout_s: float) -> bool:
        """Read the next message on iopub. Return whether there was one."""
        try:
            message = self.kernel.client.get_iopub_msg(timeout=max(0.01, timeout_s))
        except queue.Empty:
            return False
        if message["msg_type"] == "debug_event":
            self.events.append(message["content"])
            self.all_events.append(message["content"])
        else:
            self.output.append(message)
        return True

    def frames(self, thread: int) -> list[tuple[str, int]]:
        """Return the names and lines of the frames of a stopped thread. IPython 7 gives a cell its own name."""
        frames = self.ask("stackTrace", threadId=thread)["body"]["stackFrames"]
        return [(_OF_CELL.sub("<module>", one["name"]), one["line"]) for one in frames]

    def locals_of(self, thread: int) -> int:
        """Return the number of the local variables of the innermost frame of a stopped thread."""
        frame = self.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
        scopes = self.ask("scopes", frameId=frame["id"])["body"]["scopes"]
        return int(scopes[0]["variablesReference"])

    def variables(self, thread: int) -> dict[str, str]:
        """Return the local variables of the innermost frame of a stopped thread."""
        found = self.ask("variables", variablesReference=self.locals_of(thread))["body"]["variables"]
        return {one["name"]: one["value"] for one in found}

    def evaluate(self, thread: int, expression: str) -> str:
        """Return the value of an expression in the innermost frame of a stopped thread."""
        frame = self.ask("stackTrace", threadId=thread)["body"]["stackFrames"][0]
        reply = self.ask("evaluate", expression=expression, frameId=frame["id"], context="repl")
        return str(reply["body"]["result"])


def run_to_end(debugger: FrontEndDebugger, cell: str, threads: list[int]) -> Reply:
    """Let these threads run on, and return the reply of the cell."""
    for thread in threads:
        assert debugger.ask("continue", threadId=thread)["success"]
    return debugger.finish(cell)


def stopped(debugger: FrontEndDebugger, count: int = 2) -> list[int]:
    """Return the threads of ranks that stop, in the order of the ranks."""
    threads = [one["threadId"] for one in debugger.wait_for("stopped", count)]
    debugger.read(0.3)  # the event of the thread that the front end shows comes last, perhaps again
    debugger.events.clear()
    named = {one["id"]: one["name"] for one in debugger.ask("threads")["body"]["threads"]}
    return sorted(threads, key=lambda thread: named[thread])
