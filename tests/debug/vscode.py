"""VS Code at a kernel: sends its recorded messages again.

`vscode_messages.json` has messages that VS Code and its Jupyter extension sent to a kernel with two ranks, with the
versions and the place in the source of each form. Numbers of threads, frames and variables, and paths of cells, differ
from kernel to kernel. So each reply is compared with the recorded one, and the numbers in it replace the recorded ones
in later requests.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.conftest import wait_until
from tests.debug.front_end import FrontEndDebugger
from tests.kernels import NotebookKernel, Reply

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("vscode_messages.json").read_text())
_NUMBERS = ("id", "threadId", "frameId", "variablesReference", "path", "sourcePath")  # they differ between kernels
_FIRST_OF_RANKS = 1 << 30
_EVENT_S = 20.0
_RUNS_S = 1.0  # time until the ranks run their cell, before Pause


class VSCode(FrontEndDebugger):
    """VS Code.

    Args:
        kernel: the notebook.
    """

    def __init__(self, kernel: NotebookKernel) -> None:
        super().__init__(kernel)
        self._here: dict[Any, Any] = {}  # numbers and paths of this kernel, by the recorded ones
        self.replies: list[tuple[str, dict[str, Any]]] = []  # commands and replies of this kernel

    def replay(self, name: str) -> list[Reply]:
        """Send the messages of a recording. Return the results of the cells that VS Code executed, also hidden ones.

        Raises:
            AssertionError: a reply differs from the recorded one.
        """
        self._here.clear()
        self.replies.clear()
        cells: list[str] = []
        ended: list[Reply] = []
        for item in RECORDED[name]:
            if "request" in item:
                request = self._translate(item["request"])
                if request["command"] == "pause":
                    self.read(_RUNS_S)
                if request["command"] == "stepIn":  # the user is slower than the ranks
                    wait_until(lambda: len(self.ask("debugInfo")["body"]["stoppedThreads"]) == 2)
                reply = self.ask(request["command"], **(request.get("arguments") or {}))
                self.replies.append((request["command"], reply))
                if "reply" in item:
                    self._compare(item["reply"], reply, request["command"])
            elif "event" in item:
                self._wait_for_event(item["event"])
            elif "execute" in item:
                message = self.kernel.client.session.msg("execute_request", self._translate(item["execute"]))
                self.kernel.client.shell_channel.send(message)
                cells.append(message["header"]["msg_id"])
            elif "executed" in item:
                ended.append(self.finish(cells[item["executed"]]))
                assert ended[-1].status == item["status"], ended[-1]
            else:
                self.kernel.interrupt()
        return ended

    def _translate(self, recorded: Any, key: str = "") -> Any:
        """Replace recorded numbers and paths by those of this kernel."""
        if isinstance(recorded, dict):
            return {name: self._translate(value, name) for name, value in recorded.items()}
        if isinstance(recorded, list):
            return [self._translate(value) for value in recorded]
        if key == "code":  # hidden code that deletes the files of cells
            for old, new in self._here.items():
                recorded = recorded.replace(old, new) if isinstance(old, str) else recorded
            return recorded
        if key in _NUMBERS and isinstance(recorded, int) and recorded >= _FIRST_OF_RANKS:
            return self._here[recorded]
        return self._here.get(recorded, recorded) if key in _NUMBERS else recorded

    def _compare(self, recorded: Any, found: Any, place: str) -> None:
        """Check the recorded parts of a reply, and keep the numbers of this kernel."""
        if isinstance(recorded, dict):
            for key, value in recorded.items():
                if key in _NUMBERS and value:
                    self._here[value] = found[key]
                else:
                    self._compare(value, found[key], f"{place}.{key}")
        elif isinstance(recorded, list) and recorded and "name" in recorded[0] and not place.endswith("stackFrames"):
            by_name = {one["name"]: one for one in found}
            for one in recorded:
                self._compare(one, by_name[one["name"]], place)
        elif isinstance(recorded, list):
            assert len(recorded) == len(found), (place, recorded, found)
            for one, other in zip(recorded, found, strict=True):
                self._compare(one, other, place)
        else:
            assert recorded == found, (place, recorded, found)

    def _wait_for_event(self, recorded: dict[str, Any]) -> None:
        body, until = self._translate(recorded["body"]), time.monotonic() + _EVENT_S
        while True:
            for event in self.events:
                if event["event"] == recorded["event"] and body.items() <= event["body"].items():
                    self.events.remove(event)
                    return
            assert self._read(until - time.monotonic()), f"no event {recorded['event']} {body}: {self.events}"
