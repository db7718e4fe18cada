"""Runs cells on a rank: everything that ipykernel does around a cell, with messages over our own connection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from sys import exc_info
from types import FrameType
from typing import Any

from IPython.core.error import InputRejected
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from torch.distributed import is_initialized

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import CellDone, Comm, Display, InputReply, Interrupt, RunCell, Taken
from ddp_notebook.rank import pymp, reserve, shortage
from ddp_notebook.rank.cell import internal_phases, isolation, kernel_api, transforms
from ddp_notebook.rank.cell.current_line import OURS
from ddp_notebook.rank.cell.exceptions import FormattingStopped, first_line, known_words, notes_of, words
from ddp_notebook.rank.cell.interpreter import Interpreter, put_names_back, write_to_stderr
from ddp_notebook.rank.cell.needed_modules import NeededModules, replaced
from ddp_notebook.rank.cell.outgoing import Outgoing
from ddp_notebook.rank.cell.signal_handlers import SignalHandlers
from ddp_notebook.rank.cell.stdin import Stdin
from ddp_notebook.rank.cell.streams import Streams
from ddp_notebook.rank.cell.tracebacks import Tracebacks
from ddp_notebook.rank.cell.truncation import bounded_display
from ddp_notebook.rank.cell.widget_comms import COMM_TYPES, RankComms, ends_capture
from ddp_notebook.rank.group.calls import why_retired
from ddp_notebook.rank.group.network import Network
from ddp_notebook.rank.hooks import Hooks
from ddp_notebook.rank.variables.copying import CellText
from ddp_notebook.records.units import bundle_chars
from ddp_notebook.records.words import IPYTHON_NAMES
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import asyncio, contextlib, gc, os, threading, time, traceback

_PARENT = "ddp-cell-"
_ASKED_BY = "ddp_asked_by"  # key in a parent header: browser message that a widget message answers
_WELL = {"status": "ok"}
_PATIENCE_S = 3.0  # maximum time to wait for memory, including the reserve
_COLLECT_AFTER_S = 0.1  # from the end of a failed cell: its result is sent first
# IPython cannot run cells without one of these.
_PARTS_OF_SHELL = (
    "compile",
    "display_formatter",
    "display_pub",
    "displayhook",
    "events",
    "history_manager",
    "input_transformer_manager",
    "kernel",
    "payload_manager",
)
# Modules of IPython that format and send values of cells.
_SHOW_VALUES = {
    "IPython.core.displayhook",
    "IPython.core.display_functions",
    "ipykernel.displayhook",
    "jupyter_client.session",
}
_OF_CODE = (SyntaxError, ValueError, MemoryError, RecursionError, InputRejected)  # errors of the compiler
_SHOWN = {"display_data", "execute_result", "update_display_data", "clear_output", "error"}


class Runner:
    """Runs cells one after the other on the engine's main thread.

    Args:
        kernel: kernel of the engine, whose shell runs the cells.
        streams: output streams of the cells.
        network: process groups of the rank.
        hooks: called at the start and the end of a cell.
        send: sends a message to the notebook. Thread-safe.
        world_size: returns the number of ranks.
    """

    def __init__(
        self,
        kernel: Any,
        streams: Streams,
        network: Network,
        hooks: Hooks,
        send: Callable[[Message], None],
        world_size: Callable[[], int],
    ) -> None:
        self.running: tuple[int, float] | None = None  # number and start (monotonic seconds) of the running cell
        self._pid = os.getpid()
        self.names: dict[str, Any] = {}  # variables that every cell finds, such as rank, local_rank and world_size
        self._kernel = kernel
        self._shell: Any = kernel.shell
        self._streams = streams
        self._send = send
        self._outgoing = Outgoing(send, streams.mark_place, world_size)
        self._task: asyncio.Task[Any] | None = None  # task of a running cell with `await`
        self._may_raise = False  # a cell without `await` runs: an interrupt may raise in it
        self._is_for_client = False  # a message of the ipyparallel client is handled, such as a `%%px` cell
        self._for_client_since_s = 0.0  # start, time.monotonic()
        self._interrupted = False
        self._uneventful = True  # the running cell has displayed nothing
        self._stopped = 0  # last cell to be stopped, perhaps before its start
        self._handlers = SignalHandlers(self._on_interrupt, network.release.note_taken)
        self._file: str | None = None  # file name of the running cell until it is compiled
        self._network = network
        self._hooks = hooks
        self._where = network.where
        self._asking = hooks.core.stdin = Stdin(
            send, self._outgoing.send_at_once, lambda: self.running[0] if self.running else None
        )
        self._comms = RankComms(kernel.comm_manager, self._outgoing.send)
        self._parents = kernel_api.Parents(kernel)
        kernel_api.intercept_sends(kernel.session, self._on_message_of_kernel)
        kernel.pre_handler_hook, kernel.post_handler_hook = self._begin_for_client, self._end_for_client
        isolation.install(self._shell)
        transforms.install(self._shell)
        self._name_files()
        self._tracebacks = Tracebacks(
            self._shell,
            self._where,
            is_running=lambda: self.running is not None,
            is_stopped=lambda: self._interrupted or network.release.is_under_way,
            explain=self._explain,
        )
        # IPython 9 formats a traceback again for a history that ranks do not have: 1 s with torch frames.
        self._shell._format_exception_for_storage = lambda error, *_, **__: {
            "ename": type(error).__name__,
            "evalue": "",
            "traceback": [],
        }
        self._show_unraisable = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable
        # Never left: an interrupt during enter or exit would leave `builtins` partly changed.
        self._shell.builtin_trap.__enter__()
        self._interpreter = Interpreter()
        names = self._shell.user_ns
        self._needed = {name: names[name] for name in IPYTHON_NAMES if name in names}
        self._collects = False  # a failed cell may have left objects in reference cycles
        self._modules: NeededModules | None = None
        self._parts_of_shell = {name: part for name in _PARTS_OF_SHELL if (part := getattr(self._shell, name, None))}

    def _explain(self, error: BaseException) -> str:
        """Return a sentence about the cause of a cell's error; "" if it is unknown."""
        self._hooks.cell_failed(error)
        return shortage.of_error(error) or why_retired(error) or self._hooks.explain(error)

    def keep_reader(self, fd: int, callback: Callable[[], object]) -> None:
        """Make the event loop read this file descriptor again if a cell removed its reader."""
        self._interpreter.keep_reader(fd, callback)

    def keep_modules(self) -> None:
        """Take a snapshot of the modules that the rank needs. Call it after the last patch, before the first cell."""
        loop = asyncio.get_running_loop()
        modules = self._modules = NeededModules(loop)
        self._interpreter.on_new_selector = lambda: modules.note_selector(loop)

    def put_modules_back(self, failed: str) -> bool:
        """Restore replaced functions and classes of modules that the rank needs. Return whether there were any.

        Args:
            failed: clause about the failure: "the event loop of this rank failed".
        """
        names = [] if self._modules is None else self._modules.put_back()
        if names:
            write_to_stderr(f"ddp_notebook: {failed} after {replaced(names)}")
        return self._interpreter.renew_selector() or bool(names)

    def submit(self, cell: RunCell) -> None:
        """Queue a cell. Call it on the event loop."""
        kernel_api.run_in_turn(self._kernel, self._run, cell, suspends=_may_await(cell.code))

    def deliver(self, message: Comm) -> None:
        """Queue a browser message for a widget. Call it on the event loop."""
        kernel_api.run_in_turn(self._kernel, self._deliver, message, suspends=False)

    def on_message(self, message: Interrupt | InputReply | Taken) -> None:
        """Handle messages that cannot wait for the main thread. Called in the agent's thread."""
        if isinstance(message, Taken):
            self._outgoing.on_taken(message)
        elif isinstance(message, Interrupt):
            self._stop(message.cell)
        else:
            self._asking.on_reply(message)

    def _stop(self, cell: int) -> None:
        """Stop a cell that has not started, or that has not noticed its interrupt."""
        self._stopped = max(self._stopped, cell)  # a stop of a cell on other ranks may have a lower number
        if self.running is not None and self.running[0] == cell and not self._network.release.was_noticed:
            self._network.release.ask(cell)

    def _begin_for_client(self) -> None:
        """Replace the hook of ipykernel, which would let SIGINT from any process interrupt the call."""
        self._for_client_since_s = time.monotonic()
        self._is_for_client = True

    def put_replaced_back(self) -> bool:
        """Restore names in `builtins` that a thread or a call of `session.client` replaced while no cell ran.

        Called in the main thread. Return whether a name was restored.
        """
        lines = [] if self.running else self._interpreter.put_builtins_back("while no cell ran")
        for line in lines:
            write_to_stderr(line)
        return bool(lines)

    def _end_for_client(self) -> None:
        self._is_for_client = False
        self.put_replaced_back()
        self._parents.forget()
        self._handlers.put_back()

    @property
    def is_for_client(self) -> bool:
        """Return whether a call of `session.client` is running, such as a `%%px` cell. Thread-safe."""
        return self._is_for_client

    @property
    def client_call_s(self) -> float:
        """Return for how many seconds a call of `session.client` has occupied the main thread. Thread-safe.

        Returns 0.0 if there is no such call, or if it awaits something: then the event loop continues.
        """
        since_s = self._for_client_since_s
        if not self._is_for_client or self._where.is_in_event_loop:
            return 0.0
        return time.monotonic() - since_s

    async def _deliver(self, message: Comm) -> None:
        """Deliver a browser message between two cells. An interrupt ends the widget's callback like a cell."""
        parent = kernel_api.request(f"{_PARENT}{self._comms.cell_of(message)}")
        parent["header"][_ASKED_BY] = message.asked_by
        self._parents.set(parent)
        self._interrupted = False  # otherwise errors of the callback are not shown
        try:
            try:
                self._may_raise = True
                self._comms.deliver(message, parent)
            finally:
                self._may_raise = False
        except KeyboardInterrupt:
            self._tracebacks.show_interrupt()
        del parent["header"][_ASKED_BY]  # later messages of threads are not answers
        self.put_replaced_back()  # the callback may have replaced functions
        self._handlers.put_back()
        self._outgoing.flush()
        self._streams.flush()

    async def _run(self, cell: RunCell) -> None:
        pid = os.getpid()
        self.running = (cell.cell, time.monotonic())
        self._interrupted = False  # before the next line: a later interrupt belongs to this cell and must not be lost
        done: CellDone | float
        try:
            internal_phases.start_cell(
                lambda: reserve.use_patiently(lambda: self._begin(cell), time.monotonic() + _PATIENCE_S)
            )
            done = await self._run_guarded(cell)
        except MemoryError:
            reserve.use_patiently(lambda: self.lose(cell.cell))
            return
        except Exception as problem:  # a cell has replaced a function that the start of a cell needs
            done = _ended_by(problem, cell.cell)
        finally:
            if os.getpid() != pid:  # child process forked by the cell: it must not use the rank's sockets
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        if isinstance(done, CellDone) and done.status == "error" and isolation.has_lost_device(done.evalue):
            print(*done.traceback, "this process can no longer use its GPU, and ends", sep="\n", file=sys.stderr)
            self._streams.flush()
            os._exit(1)  # the notebook treats this as a dead rank with this message, and replaces it
        internal_phases.send_output(lambda: reserve.use_patiently(self._outgoing.flush))
        self.running = None  # before the notebook receives the end, because it may then request the state
        internal_phases.send_output(lambda: self._send_end(cell.cell, done))
        if self._collects:
            with contextlib.suppress(Exception):  # a function of the event loop is replaced; the next cell collects
                asyncio.get_running_loop().call_later(_COLLECT_AFTER_S, self._collect)

    def _send_end(self, cell: int, done: CellDone | float) -> None:
        """Send the end of a cell: its result, or its duration if it succeeded."""
        if isinstance(done, CellDone):
            reserve.use_patiently(lambda: self._streams.end(cell))
            reserve.use_patiently(lambda: self._send(done))
        else:
            reserve.use_patiently(lambda: self._streams.end(cell, done))

    def _collect(self) -> None:
        """Collect garbage after a failed cell, because its frames and exceptions refer to each other.

        Not before the end of the cell: with large libraries this takes seconds, and no other thread runs.
        """
        if self._collects:
            self._collects = False
            internal_phases.clean_up(gc.collect)

    def _begin(self, cell: RunCell) -> None:
        """Prepare this process for a cell. May be called again after a MemoryError."""
        self._collect()
        self._network.begin_cell(cell.cell, cell.groups_made)
        pymp.restore()
        self._streams.begin()

    def lose(self, cell: int, problem: Exception | None = None) -> None:
        """Report a cell that ended before or after its own code, usually due to missing memory.

        Blocks until memory is available.

        Args:
            problem: None for missing memory.
        """
        if self.running is not None and self.running[0] == cell:
            self.running = None
        if problem is None or isinstance(problem, MemoryError):
            done = _without_memory(cell)
        else:
            self.put_modules_back("this cell could not begin")
            done = _ended_by(problem, cell)
        reserve.use_patiently(lambda: self._streams.end(cell))
        reserve.use_patiently(lambda: self._send(done))

    async def _run_guarded(self, cell: RunCell) -> CellDone | float:
        """Run a cell. Return its result, or only its duration if it succeeded and there is nothing else to report."""
        started = time.perf_counter()
        had_group = is_initialized()  # takes 0.1 us
        self._tracebacks.begin()
        self._uneventful = True
        self._file = cell.file
        result: ExecutionResult | None = None
        failure: BaseException | None = None
        try:
            code = internal_phases.start_cell(lambda: self._prepare(cell))
            result = await self._execute(code)
            if self._put_modules_back(result.error_before_exec):  # no code of the cell has run
                self._shell.execution_count = cell.execution_count
                self._tracebacks.begin()
                self._uneventful = True
                self._file = cell.file
                result = await self._execute(code)
        except BaseException as error:  # not caught by IPython; the notebook must get it
            self._may_raise = False  # from here on an exception would end the rank's event loop
            failure = _of_compiler(error)
            if failure is error:
                self._tracebacks.show_escaped()
                self._put_modules_back(failure)
        finally:
            self._may_raise = False
            self._task = None
            self._handlers.put_back()
        duration_s = time.perf_counter() - started
        return internal_phases.clean_up(lambda: self._finish(cell, result, failure, duration_s, had_group=had_group))

    def _prepare(self, cell: RunCell) -> str:
        """Prepare the shell and the features for a cell. Return the code to run."""
        shell = self._shell
        self._parents.set(kernel_api.request(f"{_PARENT}{cell.cell}"))
        if shell.execution_count != cell.execution_count:  # setting a trait is slower than reading it
            shell.execution_count = cell.execution_count
        for begins in self._hooks.cell_begins:
            begins(cell)
        if cell.may_stop:
            for begins in self._hooks.debugged_cell_begins:
                begins(cell)
        if self._stopped == cell.cell:
            raise KeyboardInterrupt
        code = cell.code
        for change in self._hooks.cell_code:
            code = change(code)
        return code

    def _finish(
        self,
        cell: RunCell,
        result: ExecutionResult | None,
        failure: BaseException | None,
        duration_s: float,
        *,
        had_group: bool,
    ) -> CellDone | float:
        """Clean up after a cell. Return its result as `_run_guarded` does.

        Args:
            result: result according to IPython; None if IPython did not run the cell.
            failure: error that IPython did not catch.
            had_group: a default group existed before the cell.
        """
        shell = self._shell
        try:
            self._end_hooks()
            if result is not None:
                self._put_modules_back(result.error_before_exec)
                if _is_of_display(result.error_in_exec):
                    self.put_modules_back("IPython could not show a value of this cell")
                failure = result.error_before_exec or result.error_in_exec
            failure = self._tracebacks.what_ended(failure)
            payload, has_group = self._take_payload(), is_initialized() or not had_group
            of_group = self._network.end_cell(failure, before_stop=self._tracebacks.failure is not None)
            outcome, findings = self._outcome(failure), self._take_findings()
            done: CellDone | float = duration_s
            if not self._uneventful or payload or not has_group or of_group or findings or outcome is not _WELL:
                done = CellDone(
                    cell=cell.cell,
                    duration_s=duration_s,
                    payload=payload,
                    has_group=has_group,
                    findings=findings,
                    **of_group,
                    **outcome,
                )
            if failure is not None:
                is_kept = any([keeps(failure) for keeps in self._hooks.keeps_frames])
                network = self._network
                with network.children.ending_loader_workers(if_=network.release.was_noticed):
                    isolation.forget_failure(shell, failure, clears=not is_kept)
                self._collects = True
            isolation.forget_tensors(shell, cell.execution_count)
            isolation.put_names_back(shell.user_ns, self.names)
        except BaseException as problem:  # raised by a user object; the cell must still end
            self._network.release.end()
            done = _ended_by(problem, cell.cell, duration_s)
        return done

    def _put_modules_back(self, failure: BaseException | None) -> bool:
        """Restore modules that IPython needs if it failed before it ran the code of a cell. Return whether there were
        any.
        """
        is_of_ipython = isinstance(failure, Exception) and not isinstance(failure, _OF_CODE)
        return is_of_ipython and self.put_modules_back("IPython could not run this cell")

    def _end_hooks(self) -> None:
        for name, ends in self._hooks.cell_ends:
            try:
                ends()
            except Exception as error:  # such as a full disk: the cell itself succeeded
                print(f"the {name} of this cell could not be completed: {words(error)}", file=sys.stderr)

    def _take_findings(self) -> list[Any]:
        try:
            return [fact for facts in self._hooks.cell_facts for fact in facts()]
        except Exception as error:  # the cell itself succeeded
            print(f"the findings of this cell are lost: {words(error)}", file=sys.stderr)
            return []

    async def _execute(self, code: str) -> ExecutionResult:
        """Do the same as the shell's `run_cell`, on the running event loop."""
        shell, result = self._shell, None
        how = internal_phases.start_cell(lambda: self._transform(code))
        suspends = _may_await(code) and shell.should_run_async(code, **how)
        reserve.begin_cell()
        cell = shell.run_cell_async(code, store_history=True, **how)
        try:
            self._may_raise = not suspends
            self._raise_if_interrupted()
            result = await (self._as_task(cell) if suspends else cell)
            return result
        finally:
            cell.close()  # otherwise Python warns about a coroutine that was never awaited
            internal_phases.clean_up(lambda: self._after_code(result))

    def _transform(self, code: str) -> dict[str, Any]:
        """Return the transformed code of a cell, or the error of its transformation, as arguments of IPython."""
        # `builtins` were checked when the previous cell ended and when this cell arrived.
        self._say_replaced("before this cell ran", self._interpreter.put_threading_back("before this cell ran"))
        transformed, problem = code, None
        try:
            transformed = self._shell.transform_cell(code)
        except Exception:
            problem = exc_info()
        return {"transformed_cell": transformed, "preprocessing_exc_tuple": problem}

    def _after_code(self, result: ExecutionResult | None) -> None:
        """Restore the interpreter after the code of a cell, and run the functions that IPython calls then."""
        self._put_interpreter_back()
        self._shell.events.trigger("post_execute")
        self._shell.events.trigger("post_run_cell", result)

    def _put_interpreter_back(self) -> None:
        """Restore the interpreter state, protected from interrupts."""
        may_raise, self._may_raise = self._may_raise, False
        reserve.end_cell()
        self._streams.put_back()
        for name, part in self._parts_of_shell.items():
            if getattr(self._shell, name, None) is None:
                setattr(self._shell, name, part)
        self._say_replaced("while this cell ran", self._interpreter.put_back())
        self._may_raise = may_raise

    def _say_replaced(self, when: str, lines: list[str]) -> None:
        lines += put_names_back(self._shell.user_ns, self._needed, when)
        if not isinstance(exc_info()[1], MemoryError):  # otherwise IPython had no memory to restore its own names
            for line in lines:
                write_to_stderr(line)

    async def _as_task(self, cell: Coroutine[Any, Any, ExecutionResult]) -> ExecutionResult:
        self._task = self._where.task = asyncio.ensure_future(cell)
        if self._interrupted:  # interrupted before the task existed
            self._task.cancel()
        try:
            return await self._task
        finally:
            self._task = self._where.task = None

    def _name_files(self) -> None:
        """Compile cells with the file names of the notebook. ipykernel's names contain the process id."""
        compiler = self._shell.compile
        name_code = compiler.get_code_name
        ours, all_ranks = f"ipykernel_{os.getpid()}", f"ipykernel_{os.getppid()}"

        def named(raw_code: str, code: str, number: int) -> str:
            try:
                return name_code(raw_code, code, number)
            except Exception:  # a cell has replaced `os.getpid` or a similar function
                return f"{all_ranks}/{number}.py"

        def get_code_name(raw_code: str, code: str, number: int) -> str:
            if isinstance(raw_code, CellText):
                self._where.cells.setdefault(raw_code.file, number)
                return raw_code.file
            name, self._file = self._file, None  # only for the cell itself: code that it compiles gets other names
            if name is not None and self._task is None:
                self._raise_if_interrupted()  # not in a hook before the cell, where IPython prints it and continues
            name = name or named(raw_code, code, number).replace(ours, all_ranks)
            self._where.enter(name, number)
            return name

        compiler.get_code_name, compiler.cells = get_code_name, self._where.cells  # read by `copying`

    def _raise_if_interrupted(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def _on_interrupt(self, frame: FrameType | None, is_again: bool) -> None:
        """Interrupt the cell. Raising while the event loop itself runs would end the rank's process."""
        if self._is_for_client:
            raise KeyboardInterrupt
        if self._tracebacks.is_formatting:
            self._tracebacks.stop_formatting(frame)
            return
        self._interrupted = True
        if not self._network.release.note_interrupt(frame, is_again):
            return
        if self._task is None:
            if self._may_raise:
                raise KeyboardInterrupt
            return
        if asyncio.current_task() is self._task and _is_in_user_code(frame):
            raise KeyboardInterrupt  # between two awaits; `run_code` of IPython catches it
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt that Python dropped in a callback, such as a callback of a weak reference."""
        is_main = threading.get_ident() == threading.main_thread().ident
        if is_main and self._interrupted and isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._network.release.note_lost()
        else:
            self._show_unraisable(unraisable)

    def _interrupt_again(self) -> None:
        """Interrupt the cell again, after an Output widget around its code suppressed the first interrupt.

        The widget is consistent again, because the end of its capture was just sent.
        """
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._tracebacks.is_hidden = False
        if self._task is not None:
            self._task.get_loop().call_soon(self._task.cancel)
        elif self._may_raise:
            raise KeyboardInterrupt

    def _outcome(self, failure: BaseException | None) -> dict[str, Any]:
        shown = self._tracebacks
        if failure is None and shown.display_error is not None:
            name, message = shown.display_error
            return {"status": "error", "ename": name, "evalue": message, "traceback": shown.of_cell}
        if failure is None:
            return _WELL
        stopped = (
            isinstance(failure, KeyboardInterrupt | FormattingStopped)
            or (self._network.release.doing is not None and shown.failure is None)
            or (self._interrupted and isinstance(failure, asyncio.CancelledError))
        )
        message = shown.words_of(failure)
        if isinstance(failure, MemoryError) and not notes_of(failure):  # raised by the parser
            why = shortage.of_error(failure)
            message = f"{message} ({why})" if why and message else why or message
            shown.of_cell += filter(None, [why])
        if isinstance(failure, SystemExit):
            what = f"SystemExit: {message}" if failure.args else "SystemExit"
            advice = isolation.advice_after_exit(failure, is_of_script=shown.of_magics.is_exit_of_script(failure))
            return {
                "status": "error",
                "ename": "SystemExit",
                "evalue": f"{message}: {advice}" if failure.args else advice,
                "traceback": [what, advice],
            }
        if isinstance(failure, SyntaxError) and failure.lineno is not None:
            message = f"{failure.msg} (line {failure.lineno})"  # the original message names a file that does not exist
        return {
            "status": "interrupted" if stopped else "error",
            "ename": "KeyboardInterrupt" if stopped else type(failure).__name__,
            "evalue": message,
            "traceback": shown.of_cell,
        }

    def _take_payload(self) -> list[dict[str, Any]]:
        manager = self._shell.payload_manager
        if payload := manager.read_payload():
            manager.clear_payload()
        return [part for part in payload if part.get("source") in ("page", "set_next_input")]

    def _on_message_of_kernel(
        self,
        msg_type: str,
        content: dict[str, Any],
        parent: dict[str, Any],
        metadata: dict[str, Any],
        buffers: Sequence[Any],
    ) -> bool:
        """Send a kernel message to the notebook if it belongs to one of our cells. Return whether it does."""
        parent_id = str(parent.get("msg_id", ""))
        cell = int(parent_id.removeprefix(_PARENT)) if parent_id.startswith(_PARENT) else None
        if msg_type in COMM_TYPES:
            if os.getpid() != self._pid:  # forked child: the connection belongs to its parent
                return True
            self._uneventful = False
            asked_by = parent.get(_ASKED_BY) or {}
            is_taken = self._comms.on_message(msg_type, content, metadata, buffers, cell, asked_by) or cell is not None
            if self._tracebacks.is_hidden and ends_capture(content):
                self._interrupt_again()
            return is_taken
        if cell is None:
            return False
        if msg_type == "error":
            content = {"text": self._tracebacks.text_to_show(content)}
            if not content["text"]:
                return True
        if os.getpid() != self._pid:  # forked child: the connection belongs to its parent
            print(content.get("text") or (content.get("data") or {}).get("text/plain", ""), flush=True)
        elif msg_type in _SHOWN:
            self._send_display(cell, msg_type, content)
        return True

    def _send_display(self, cell: int, msg_type: str, content: dict[str, Any]) -> None:
        """Send a display of a cell. A later update of a display replaces an unsent one."""
        self._uneventful = False
        content = bounded_display(content)
        if msg_type == "clear_output" and self._comms.is_capturing:
            content = {**content, "inside": True}  # it clears an Output widget, not the cell's output
        handle = (content.get("transient") or {}).get("display_id")
        key = ("display", handle) if msg_type == "update_display_data" and handle is not None else None
        display = Display(cell=cell, msg_type=msg_type, content=content, place=0)
        self._outgoing.send(display, bundle_chars(content.get("data") or {}), key)


def _is_of_display(failure: BaseException | None) -> bool:
    """Return whether IPython failed while it showed a value. It shows the errors of the value's own methods itself."""
    at = failure.__traceback__ if isinstance(failure, Exception) else None
    while at is not None:
        if at.tb_frame.f_globals.get("__name__") in _SHOW_VALUES:
            return True
        at = at.tb_next
    return False


def _without_memory(cell: int) -> CellDone:
    """Return the end of a cell for which this process had no memory."""
    try:
        why = shortage.of_error(MemoryError())
    except MemoryError:
        why = ""
    why = why or "this process has no memory left"
    return CellDone(cell=cell, status="error", duration_s=0.0, ename="MemoryError", evalue=why, traceback=[why])


def _ended_by(problem: BaseException, cell: int, duration_s: float = 0.0) -> CellDone:
    """Return the end of a cell whose start or end raised an exception, for example in a replaced function."""
    try:
        lines, why = _lines_of(problem), shortage.of_error(problem)
    except Exception:  # it cannot be formatted either
        lines, why = [first_line(problem)], ""
    return CellDone(
        cell=cell,
        status="error",
        duration_s=duration_s,
        ename=type(problem).__name__,
        evalue=why or known_words(problem),
        traceback=[*lines, *filter(None, [why])],
    )


def _lines_of(problem: BaseException) -> list[str]:
    """Format an exception that user code raised in a call from our code, without our frames if there are others."""
    shown = traceback.TracebackException.from_exception(problem)
    theirs = [frame for frame in shown.stack if not frame.filename.startswith(OURS)]
    if theirs:
        shown.stack = traceback.StackSummary.from_list(theirs)
    return "".join(shown.format()).splitlines()


def _of_compiler(error: BaseException) -> BaseException:
    """Return a MemoryError for a SystemError of `compile` that hides one; return any other error unchanged.

    `compile` of Python 3.11 sometimes fails without an exception when memory is exhausted.
    """
    says_nothing = isinstance(error, SystemError) and "compile> returned NULL without setting" in known_words(error)
    return MemoryError() if says_nothing and shortage.lacks_memory() else error


def _is_in_user_code(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is InteractiveShell.run_code.__code__:
            return True
        frame = frame.f_back
    return False


def _may_await(code: str) -> bool:
    """Return whether the code may contain a top-level `await`, `async for` or `async with`."""
    return "await" in code or "async" in code
