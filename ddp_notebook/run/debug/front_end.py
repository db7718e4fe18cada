"""The debugger of the front end, such as JupyterLab, for the ranks: breakpoints in the margin of a cell stop them.

The front end has one debugger, that of the kernel. This module adds the ranks' threads to it: it handles the requests
that concern a rank, and sends the events of ranks. All other requests go to the kernel.

Forms of messages:
- JupyterLab and Notebook 7: `DebuggerService` and `DebuggerSession` in `@jupyterlab/debugger`. They show one stopped
  thread: that of the last `stopped` event. Before `continue` they forget it, and send thread 1.
- VS Code: `KernelDebugAdapterBase` of vscode-jupyter. It shows all threads, and asks for their names by `threads`. It
  sends `disconnect` when the cell has ended. See `tests/debug/vscode_messages.json`.

Source: https://jupyter-client.readthedocs.io/en/stable/messaging.html#debug-request,
https://github.com/microsoft/vscode-jupyter/blob/main/src/notebooks/debugger/kernelDebugAdapterBase.ts,
https://github.com/jupyterlab/jupyterlab/blob/main/packages/debugger/src/service.ts
"""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ddp_notebook.launch.cluster import Cluster
from ddp_notebook.records.words import name_ranks
from ddp_notebook.run.debug.adapter_ids import AdapterIds
from ddp_notebook.run.debug.cell_sources import CellSources
from ddp_notebook.run.debug.kernel_debugger import PACKAGE, KernelDebugger
from ddp_notebook.run.debug.rank_adapters import RankAdapters
from ddp_notebook.run.debug.variable_groups import group, read_group
from ddp_notebook.run.rank_requests import Questions

Reply = dict[str, Any]
_log = logging.getLogger(__name__)
_ATTACH_S = 1.2  # longest time that the front end waits for ranks; busy ones follow before their next cell
_PREPARE_S = 10.0  # longest time that a cell waits for debugpy on its ranks
_GATHER_S = 0.05  # time for other ranks to stop too
_NEXT_S = 0.1  # from the reply to `continue` until the next stopped rank is shown
_INTERRUPT_S = 0.5  # time after `disconnect` for the stop button, before stopped ranks run on
_RESUME_S = 1.0  # longest time until a thread runs on after a request
_LOOK_S = 0.02
_STEP_S = 1.0  # time of a step after which another stopped rank is shown
_OWN_THREADS = ("ddp-", "ddp_notebook")  # names of this package's threads in the notebook
_RESUMES = ("continue", "next", "stepIn", "stepOut")
_BY_LINE = 0  # `KernelDebugMode.RunByLine` of vscode-jupyter, `src/notebooks/debugger/debuggingTypes.ts`
_IDS = {"threadId": "thread", "frameId": "frame", "variablesReference": "variables"}
# Packages that run cells. Their frames are between those of a cell, for example those of `%%time`.
_INTERNAL = re.compile(
    r"/(?:site|dist)-packages/(?:ddp_notebook|IPython|ipykernel|ipyparallel|tornado|traitlets|debugpy)/"
    r"|/python3[^/]*/asyncio/"
)
_INITIALIZE = {
    "adapterID": "ddp_notebook",
    "pathFormat": "path",
    "linesStartAt1": True,
    "columnsStartAt1": True,
    "supportsVariableType": True,
}
_ATTACH = {
    "justMyCode": True,
    "redirectOutput": False,
    "stopAllThreadsOnSuspend": False,  # a thread of a rank stops alone
    "steppingResumesAllThreads": False,
}


class _Stop(NamedTuple):
    """A stopped thread of a rank."""

    rank: int
    process: object  # process of the rank, which may have ended since
    body: Reply  # body of the `stopped` event


class FrontEnd:
    """The front end's debugger, for the ranks of a session.

    Its methods run in the event loop of the kernel's control thread, except those under "other threads".

    Args:
        debugger: the debugger of the kernel.
        cluster: the ranks.
        sources: files of cells.
        questions: sends requests to the ranks.
        busy: returns the ranks that run a cell.
        on_change: called when a rank has stopped or runs on.
    """

    def __init__(
        self,
        debugger: KernelDebugger,
        cluster: Cluster,
        sources: CellSources,
        questions: Questions,
        busy: Callable[[], Sequence[int]],
        on_change: Callable[[], None],
    ) -> None:
        self._debugger = debugger
        self._cluster = cluster
        self._sources = sources
        self._questions = questions
        self._busy = busy
        self._on_change = on_change
        self._ids = AdapterIds()
        self.adapters = RankAdapters(cluster, debugger.loop, self._on_event)
        self._attached: dict[int, object] = {}  # process of each rank that debugpy follows
        self._without: dict[int, object] = {}  # process of each rank that debugpy cannot follow
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._main_threads: dict[int, int] = {}  # number of the main thread in debugpy of each rank
        self._for_all: dict[str, Reply] = {}  # arguments of the last request of `_on_setting`, by command
        self._stopped: dict[int, _Stop] = {}  # stopped threads, by their number in the front end
        self._unshown: list[int] = []  # stopped threads whose events were not sent yet
        self._resumed: set[int] = set()  # threads that run on by a request of the front end
        self._selected = 0  # the thread that the front end shows; 0: none
        self._is_by_line = False  # VS Code's "Run by Line": all ranks make each step
        self._leaving: asyncio.TimerHandle | None = None  # lets stopped ranks run on, after `disconnect`
        self._errors: dict[int, str] = {}  # why debugpy does not follow a rank
        self._files: dict[str, tuple[int, int]] = {}  # rank and frame that show a file
        debugger.intercept(self._handle)
        if debugger.is_on:
            self._call_soon(debugger.skip_this_package)

    # ---- other threads

    def remove(self) -> None:
        """Let the kernel handle all requests itself again, and show no rank as stopped."""
        self._debugger.remove()
        self._call_soon(self._forget_stops)

    def update(self) -> None:
        """Show the ranks that have died no longer as stopped."""
        if not all(self._is_alive(stop) for stop in list(self._stopped.values())):
            self._call_soon(self._show_stops)

    def _call_soon(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the kernel ends
            self._debugger.loop.call_soon_threadsafe(function)

    @property
    def is_on(self) -> bool:
        """Return whether the front end's debugger is on."""
        return self._debugger.is_on

    def stopped_ranks(self) -> set[int]:
        """Return the ranks that have stopped, without those that have died since."""
        return {stop.rank for stop in list(self._stopped.values()) if self._is_alive(stop)}

    def _is_alive(self, stop: _Stop) -> bool:
        return stop.rank in self._cluster.alive and self._cluster.process(stop.rank) is stop.process

    def prepare(self, ranks: Collection[int]) -> None:
        """Let debugpy follow these ranks, before a cell is sent to them."""
        if not self.is_on or not any(self._is_new(rank) for rank in ranks):
            return
        future = asyncio.run_coroutine_threadsafe(self._attach(ranks, _PREPARE_S), self._debugger.loop)
        try:
            future.result(_PREPARE_S + 1)
        except (FutureTimeoutError, RuntimeError):
            _log.warning("debugpy did not start on all ranks in time")

    def errors(self) -> list[str]:
        """Return a line for the ranks that debugpy does not follow, once."""
        errors, self._errors = self._errors, {}
        by_error: dict[str, list[int]] = {}
        for rank, error in errors.items():
            by_error.setdefault(error, []).append(rank)
        return [f"the front end's debugger does not stop {name_ranks(on)}: {error}" for error, on in by_error.items()]

    # ---- attaching

    def _follows(self, rank: int) -> bool:
        return rank in self._cluster.alive and self._attached.get(rank) is self._cluster.process(rank)

    def _is_new(self, rank: int) -> bool:
        return not self._follows(rank) and self._without.get(rank) is not self._cluster.process(rank)

    async def _attach(self, ranks: Collection[int], wait_s: float) -> None:
        """Let debugpy follow ranks, and wait for those that run no cell."""
        for rank in ranks:
            if rank in self._cluster.alive and self._is_new(rank) and rank not in self._attaching:
                self._attaching[rank] = asyncio.ensure_future(self._attach_rank(rank))
        if tasks := [self._attaching[rank] for rank in ranks if rank in self._attaching]:
            await asyncio.wait(tasks, timeout=wait_s)

    async def _attach_rank(self, rank: int) -> None:
        process = self._cluster.process(rank)
        try:
            if error := await self.adapters.start(rank):
                self._errors[rank], self._without[rank] = error, process
            elif self.is_on:
                await self._configure(rank)
                self._attached[rank] = process
            else:  # it was switched off in the meantime
                self.adapters.stop(rank)
        finally:
            self._attaching.pop(rank, None)

    async def _configure(self, rank: int) -> None:
        """Send the state of the front end's debugger to debugpy on a rank."""
        self._forget(rank)
        ask = partial(self.adapters.ask, most_s=_PREPARE_S)
        begin = [ask(rank, "initialize", _INITIALIZE), ask(rank, "attach", _ATTACH), ask(rank, "configurationDone")]
        *_, threads = await asyncio.gather(*begin, ask(rank, "threads"))
        sent = None
        while sent != (now := (dict(self._debugger.breakpoints), dict(self._for_all))):  # the front end has changed it
            sent = now
            requests = [self._set_on(rank, path, lines) for path, lines in now[0].items()]
            requests += [ask(rank, command, arguments) for command, arguments in now[1].items()]
            await asyncio.gather(*requests)
        for one in threads["body"].get("threads", ()):
            if one["name"] == "MainThread":
                self._main_threads[rank] = one["id"]

    def _detach(self) -> None:
        """Follow no more cells. Stopped ranks run on a little later, because the stop button may be pressed now."""
        stopped = self.stopped_ranks() & self._attached.keys()
        for rank in self._attached.keys() - stopped:
            self.adapters.stop(rank)
        self._attached.clear()
        self._for_all.clear()
        if stopped:
            self._leaving = self._debugger.loop.call_later(_INTERRUPT_S, self._leave_ranks, stopped)

    def _leave_ranks(self, ranks: Collection[int]) -> None:
        self._leaving = None
        for rank in ranks:
            self.adapters.stop(rank)

    def _forget(self, rank: int) -> None:
        """Forget a former process of a rank."""
        for thread in self._threads_of(rank):
            self._stopped.pop(thread, None)
        self._ids.forget(rank, threads=True)
        if self._ids.find(self._selected) is None:
            self._selected = 0

    def _threads_of(self, rank: int) -> list[int]:
        return [thread for thread, stop in self._stopped.items() if stop.rank == rank]

    # ---- requests of the front end

    async def _handle(self, request: Reply) -> Reply:
        try:
            return await self._reply(request)
        except Exception as error:  # the front end waits for a response
            _log.exception("a request of the front end's debugger failed")
            return _response(request, success=False, message=f"ddp_notebook: {error}", body={})

    async def _reply(self, request: Reply) -> Reply:
        command, arguments = request["command"], request.get("arguments") or {}
        handle: Any = {
            "attach": self._on_attach,
            "disconnect": self._on_disconnect,
            "debugInfo": self._on_info,
            "threads": self._on_threads,
            "inspectVariables": self._on_inspect,
            "pause": self._on_pause,
            "setBreakpoints": self._on_breakpoints,
            "setExceptionBreakpoints": self._on_setting,
            "setFunctionBreakpoints": self._on_setting,
            "source": self._on_source,
        }.get(command)
        if handle is not None:
            reply: Reply = await handle(request, arguments)
            return reply
        frame = arguments.get("srcFrameId" if command == "copyToGlobals" else "frameId")
        if command == "richInspectVariables" and (at := self._ids.find(frame)) is not None:
            return await self._describe(request, arguments, *at)
        if command == "copyToGlobals" and (at := self._ids.find(frame)) is not None:
            return await self._copy_to_globals(request, arguments, *at)
        if (on_rank := self._on_rank(command, arguments)) is not None:
            return await self._ask_rank(request, *on_rank)
        return await self._debugger.ask(request)

    def _on_rank(self, command: str, arguments: Reply) -> tuple[int, Reply] | None:
        """Return the rank that a request concerns, and the arguments there. None: it concerns the kernel."""
        if command in _RESUMES and self._stopped and arguments.get("threadId") is not None:
            is_of_kernel = arguments["threadId"] in self._debugger.stopped_threads
            if self._ids.find(arguments["threadId"]) is None and not is_of_kernel:
                arguments = {**arguments, "threadId": self._selected}
        for name in _IDS:
            if (found := self._ids.find(arguments.get(name))) is not None:
                rank, number = found
                return rank, {**arguments, name: number}
        return None

    async def _ask_rank(self, request: Reply, rank: int, arguments: Reply) -> Reply:
        command = request["command"]
        if command == "variables" and not arguments["variablesReference"]:  # a group
            read = self._debugger.loop.run_in_executor(None, read_group, self._questions, rank)
            return _response(request, body={"variables": await read})
        if command in _RESUMES:
            return await self._resume(request, rank, arguments)
        if command == "stackTrace":
            first, most = arguments.pop("startFrame", 0) or 0, arguments.pop("levels", 0)
            reply = await self.adapters.ask(rank, command, arguments)
            is_stopped = self._ids.add("thread", rank, arguments["threadId"]) in self._stopped
            frames = self._frames(rank, (reply.get("body") or {}).get("stackFrames", [])) if is_stopped else []
            body: Reply = {"stackFrames": frames[first : first + most if most else None], "totalFrames": len(frames)}
        else:
            reply = await self.adapters.ask(rank, command, arguments)
            body = self._with_ids(rank, reply.get("body") or {})
        return {**reply, "seq": request["seq"], "request_seq": request["seq"], "body": body}

    def _with_ids(self, rank: int, body: Reply) -> Reply:
        """Return a response with the numbers of the front end."""
        body = {**body}
        for name in ("scopes", "variables"):
            if name in body:
                body[name] = [
                    self._with_ids(rank, one) for one in body[name] if self._debugger.accepts(str(one.get("name")))
                ]
        if body.get("variablesReference"):
            body["variablesReference"] = self._ids.add("variables", rank, body["variablesReference"])
        return body

    def _frames(self, rank: int, frames: Sequence[Reply]) -> list[Reply]:
        """Return the frames of the user's code, from the innermost one to the cell."""
        paths = [(frame.get("source") or {}).get("path", "") for frame in frames]
        of_cells = [at for at, path in enumerate(paths) if self._sources.has(path)]
        shown = []
        for at, frame in enumerate(frames[: of_cells[-1] + 1] if of_cells else frames):
            if paths[at].startswith(PACKAGE) or _INTERNAL.search(paths[at]):
                continue
            path, line = self._sources.outer(paths[at], frame["line"])
            self._files[path] = rank, frame["id"]
            source = frame.get("source") or {}
            if path != paths[at]:
                source = {**source, "path": path, "sourceReference": 0}
            ours = self._ids.add("frame", rank, frame["id"])
            shown.append({**frame, "id": ours, "name": f"[{rank}] {frame['name']}", "line": line, "source": source})
        return shown

    async def _describe(self, request: Reply, arguments: Reply, rank: int, frame: int) -> Reply:
        """Return a variable as a display, see `Debugger.richInspectVariables` of ipykernel."""
        name = str(arguments.get("variableName"))
        if not name.isidentifier():
            return _response(request, body={"data": {}, "metadata": {}})
        code = f"get_ipython().display_formatter.format({name})"
        asked = {"expression": code, "frameId": frame, "context": "clipboard"}
        reply = await self.adapters.ask(rank, "evaluate", asked)
        if not reply["success"]:
            return _response(request, success=False, message=reply.get("message", ""), body={})
        data, metadata = ast.literal_eval(reply["body"]["result"])
        return _response(request, body={"data": data, "metadata": metadata})

    async def _on_source(self, request: Reply, arguments: Reply) -> Reply:
        """Return the text of a file. A rank reads a file that does not exist on the notebook's machine."""
        reply = await self._debugger.ask(request)
        path = (arguments.get("source") or {}).get("path", "")
        if reply.get("success") or path not in self._files:
            return reply
        rank, frame = self._files[path]
        code = f"''.join(__import__('linecache').getlines({path!r}))"
        asked = {"expression": code, "frameId": frame, "context": "clipboard"}
        answer = await self.adapters.ask(rank, "evaluate", asked)
        if not answer["success"]:
            return reply
        return _response(request, body={"content": ast.literal_eval(answer["body"]["result"])})

    async def _copy_to_globals(self, request: Reply, arguments: Reply, rank: int, frame: int) -> Reply:
        names = [str(arguments.get(key)) for key in ("srcVariableName", "dstVariableName")]
        if not all(name.isidentifier() for name in names):
            return _response(request, success=False, message="names must be identifiers", body={})
        asked = {"expression": f"globals()[{names[1]!r}]", "value": names[0], "frameId": frame}
        return {**await self.adapters.ask(rank, "setExpression", asked), "request_seq": request["seq"]}

    # ---- the debugger as a whole

    async def _on_attach(self, request: Reply, arguments: Reply) -> Reply:
        self._is_by_line = arguments.get("__mode") == _BY_LINE
        if self._leaving is not None:
            self._leaving.cancel()
            self._leave_ranks(self.stopped_ranks())
        reply = await self._debugger.ask(request)
        self._debugger.skip_this_package()
        if self.is_on:
            await self._attach(self._cluster.alive, _ATTACH_S)
        return reply

    async def _on_disconnect(self, request: Reply, _: Reply) -> Reply:
        if not self.is_on:  # VS Code sends it twice, and ipykernel would raise an error
            return _response(request)
        self._detach()
        return await self._debugger.ask(request)

    async def _on_info(self, request: Reply, _: Reply) -> Reply:
        reply = await self._debugger.ask(request)
        threads = sorted(self._stopped, key=lambda thread: thread != self._selected)
        reply["body"]["stoppedThreads"] = [*threads, *reply["body"]["stoppedThreads"]]
        return reply

    async def _on_threads(self, request: Reply, _: Reply) -> Reply:
        reply = await self._debugger.ask(request)
        if not reply.get("success"):
            return reply
        ranks = [rank for rank in sorted(self._attached) if self._follows(rank)]
        answers = await asyncio.gather(*(self.adapters.ask(rank, "threads") for rank in ranks))
        threads = []
        for rank, found in zip(ranks, answers, strict=True):
            for one in (found.get("body") or {}).get("threads", ()):
                thread = self._ids.add("thread", rank, one["id"])
                if one["name"] == "MainThread":
                    threads.append({"id": thread, "name": f"rank {rank}"})
                elif thread in self._stopped:
                    threads.append({"id": thread, "name": f"rank {rank}, {one['name']}"})
        # VS Code's Pause stops the first thread of the list: that of the notebook, which stands for all ranks
        main, *others = reply["body"]["threads"]
        shown = [one for one in others if not one["name"].startswith(_OWN_THREADS)]
        reply["body"]["threads"] = [main, *threads, *shown]
        return reply

    async def _on_inspect(self, request: Reply, _: Reply) -> Reply:
        """Show the variables of each rank as a group before those of the notebook."""
        reply = await self._debugger.ask(request)
        if reply.get("success"):
            groups = [group(rank, self._ids.add("group", rank, 0)) for rank in self._cluster.alive]
            reply["body"]["variables"] = [*groups, *reply["body"]["variables"]]
        return reply

    async def _on_pause(self, request: Reply, arguments: Reply) -> Reply:
        """Stop the ranks at their next line. The notebook's own thread waits for them, and must not stop."""
        found = self._ids.find(arguments.get("threadId"))
        ranks = self._busy() if found is None else [found[0]]
        running = [rank for rank in ranks if self._follows(rank) and rank not in self.stopped_ranks()]
        running = [rank for rank in running if rank in self._main_threads]
        if not running:
            return _response(request, success=False, message="no rank runs a cell that debugpy follows", body={})
        await asyncio.gather(*(self._pause_rank(rank) for rank in running))
        return _response(request, body={})

    async def _pause_rank(self, rank: int) -> None:
        number = self._main_threads[rank]
        thread, until = self._ids.add("thread", rank, number), self._debugger.loop.time() + _RESUME_S
        # debugpy would undo a request to run on that its thread has not noticed, without a `stopped` event
        while thread in self._resumed and self._debugger.loop.time() < until:
            await asyncio.sleep(_LOOK_S)
        await self.adapters.ask(rank, "pause", {"threadId": number})

    async def _on_setting(self, request: Reply, arguments: Reply) -> Reply:
        """Handle breakpoints that belong to no file: for exceptions and functions, in the notebook and on all ranks."""
        self._for_all[request["command"]] = arguments
        reply = await self._debugger.ask(request)
        ranks = [rank for rank in self._attached if self._follows(rank)]
        await asyncio.gather(*(self.adapters.ask(rank, request["command"], arguments) for rank in ranks))
        return reply

    # ---- breakpoints

    async def _on_breakpoints(self, request: Reply, arguments: Reply) -> Reply:
        path = arguments["source"].get("path", "")
        asked: list[Reply] = arguments.get("breakpoints") or []
        cell = self._sources.cell(path)
        if cell is None or not cell.is_of_ranks:
            reply = await self._debugger.ask(request)
            lines = [one.get("line") for one in (reply.get("body") or {}).get("breakpoints", ())]
            if len(lines) == len(asked):  # ipykernel keeps the lines only, and drops conditions
                asked = [{**one, "line": line or one["line"]} for one, line in zip(asked, lines, strict=True)]
        else:
            placed = [(one, cell.line_on_ranks(one["line"])) for one in asked]
            asked = [{**one, "line": line + cell.above if line else one["line"]} for one, line in placed]
            found = [
                {"verified": bool(line), "line": one["line"], "source": {"path": path}}
                for one, (_, line) in zip(asked, placed, strict=True)
            ]
            reply = _response(request, body={"breakpoints": found})
        self._debugger.breakpoints[path] = asked
        ranks = [rank for rank in self._attached if self._follows(rank)]
        answers = await asyncio.gather(*(self._set_on(rank, path, asked) for rank in ranks))
        if cell is None:  # the file may exist on other hosts only
            _add_verified(reply, answers)
        return reply

    async def _set_on(self, rank: int, path: str, breakpoints: Sequence[Reply]) -> Reply:
        """Set the breakpoints of one file on a rank."""
        cell, file = self._sources.cell(path), path
        if cell is not None:
            file = cell.file
            placed = [(one, cell.line_on_ranks(one["line"])) for one in breakpoints]
            breakpoints = [{**one, "line": line} for one, line in placed if line]
        arguments = {"source": {"path": file}, "breakpoints": list(breakpoints), "sourceModified": False}
        return await self.adapters.ask(rank, "setBreakpoints", arguments, "" if cell is None else file)

    # ---- stopped and running threads

    async def _resume(self, request: Reply, rank: int, arguments: Reply) -> Reply:
        """Let a stopped rank run on, and let the front end show the next one after `continue`."""
        command = request["command"]
        thread = self._ids.add("thread", rank, arguments["threadId"])
        resumed = self._threads_of(rank) if command == "continue" else [thread]
        self._selected = thread
        self._resumed.update(resumed)
        for one in resumed:
            self._stopped.pop(one, None)
            if command == "continue":
                self._send_continued(one)
        self._ids.forget(rank)
        others = self._step_all(command) if self._is_by_line and command != "continue" else []
        reply, *_ = await asyncio.gather(self.adapters.ask(rank, command, arguments), *others)
        self._on_change()
        reply = {**reply, "seq": request["seq"], "request_seq": request["seq"]}
        if command != "continue":
            self._debugger.loop.call_later(_STEP_S, self._leave, thread)
            return reply
        self._selected = 0
        self._debugger.loop.call_later(_NEXT_S, self._show_stops)
        # debugpy means the threads of this rank; VS Code would show all ranks as running
        return {**reply, "body": {**(reply.get("body") or {}), "allThreadsContinued": False}}

    def _step_all(self, command: str) -> list[Coroutine[Any, Any, Reply]]:
        """Return requests that let all stopped ranks make a step. They count as running from now on."""
        asked = []
        for thread, stop in list(self._stopped.items()):
            found = self._ids.find(thread)
            if found is not None and self._is_alive(stop):
                del self._stopped[thread]
                self._resumed.add(thread)
                self._ids.forget(stop.rank)
                asked.append(self.adapters.ask(stop.rank, command, {"threadId": found[1]}))
        return asked

    def _leave(self, thread: int) -> None:
        """Show another thread if this one has not stopped after a step. The cell may have ended."""
        if self._selected == thread and thread not in self._stopped:
            self._selected = 0
            self._send_continued(thread)
            self._show_stops()

    def _on_event(self, rank: int, event: Reply) -> None:
        body = event.get("body") or {}
        if event["event"] == "stopped":
            thread = self._ids.add("thread", rank, body["threadId"])
            body = {**body, "threadId": thread, "allThreadsStopped": False}
            self._stopped[thread] = _Stop(rank, self._cluster.process(rank), body)
            self._unshown.append(thread)
            self._on_change()
            self._debugger.loop.call_later(_GATHER_S, self._show_stops)
        elif event["event"] == "continued":
            thread = self._ids.add("thread", rank, body["threadId"])
            if thread in self._resumed:  # see `_resume`; a later event would hide the next stop of a step
                self._resumed.discard(thread)
                return
            self._on_running(thread)
        elif event["event"] == "output":  # a breakpoint that logs a message, in VS Code
            self._send("output", {**body, "output": f"[{rank}] {body['output']}"})

    def _on_running(self, thread: int) -> None:
        """Handle a thread that runs on because its cell was stopped, or that has ended."""
        stop = self._stopped.pop(thread, None)
        if (found := self._ids.find(thread)) is not None:
            self._ids.forget(found[0])
        self._on_change()
        self._send_continued(thread)
        if stop is not None and not self._is_alive(stop):
            self._send("thread", {"threadId": thread, "reason": "exited"})  # VS Code removes it from its list
        if self._selected == thread:
            self._selected = 0
            self._debugger.loop.call_later(_NEXT_S, self._show_stops)

    def _forget_stops(self) -> None:
        """Show no rank as stopped: the session ends."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        for thread in self._stopped:
            self._send_continued(thread)
        self._stopped.clear()

    def _show_stops(self) -> None:
        """Send the events of stopped threads, and last that of the thread which the front end shows."""
        for thread, stop in list(self._stopped.items()):
            if not self._is_alive(stop):
                self._on_running(thread)
        new = [thread for thread in self._unshown if thread in self._stopped]
        self._unshown.clear()
        if is_new_selection := bool(self._stopped and not self._selected):
            self._selected = min(self._stopped, key=lambda thread: self._ids.find(thread) or (0, 0))
        for thread in new:
            if thread != self._selected and not self._is_by_line:  # VS Code's "Run by Line" shows one thread
                self._send("stopped", {**self._stopped[thread].body, "preserveFocusHint": True})
        is_sent = self._selected in new if self._is_by_line else bool(new)  # it would step a thread that stops twice
        if (is_sent or is_new_selection) and self._selected in self._stopped:
            self._send("stopped", {**self._stopped[self._selected].body, "preserveFocusHint": False})

    def _send_continued(self, thread: int) -> None:
        """Report a running thread. Until then, JupyterLab keeps "Paused in Debugger" on the page."""
        self._send("continued", {"threadId": thread, "allThreadsContinued": False})

    def _send(self, name: str, body: Reply) -> None:
        if self.is_on:
            self._debugger.send_event({"type": "event", "seq": 0, "event": name, "body": body})


def _add_verified(reply: Reply, answers: Sequence[Reply]) -> None:
    """Show the breakpoints of a file as set if a rank has set them."""
    shown = (reply.get("body") or {}).get("breakpoints", [])
    for answer in answers:
        for one, on_rank in zip(shown, (answer.get("body") or {}).get("breakpoints", ()), strict=False):
            if on_rank.get("verified") and not one.get("verified"):
                one.pop("message", None)
                one |= {"verified": True, "line": on_rank["line"]}


def _response(request: Reply, *, success: bool = True, **more: Any) -> Reply:
    answered = {"seq": request["seq"], "request_seq": request["seq"], "command": request["command"]}
    return {"type": "response", **answered, "success": success, **more}
