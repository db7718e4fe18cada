"""The rank's process: its main thread forms groups, and runs the notebook's cells as an ipyparallel engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from traitlets.config import Config

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.processes import RankSpec
from ddp_notebook.messages.ranks import (
    Check,
    Checked,
    Comm,
    Engine,
    Form,
    Formed,
    InputReply,
    Interrupt,
    Lost,
    Peek,
    Pull,
    Pulled,
    Push,
    Pushed,
    Ready,
    Register,
    Registered,
    RunCell,
    Taken,
)
from ddp_notebook.rank import gpu, own_signals, pymp, reserve, shortage, thread_count
from ddp_notebook.rank.agent import RankAgent
from ddp_notebook.rank.cell import commands, internal_phases, isolation, kernel_api, script_functions, signal_handlers
from ddp_notebook.rank.cell.background_code import BackgroundCode
from ddp_notebook.rank.cell.children import StoppedChildren
from ddp_notebook.rank.cell.exceptions import FormattingStopped, with_type
from ddp_notebook.rank.cell.inbox import Inbox
from ddp_notebook.rank.cell.runner import Runner
from ddp_notebook.rank.cell.streams import Streams
from ddp_notebook.rank.engine import RankEngine
from ddp_notebook.rank.group import join
from ddp_notebook.rank.group.network import Network
from ddp_notebook.rank.group.stores import is_timeout_of_store
from ddp_notebook.rank.hide_from_profiler import unseen
from ddp_notebook.rank.hooks import Core, Hooks
from ddp_notebook.rank.variables import comparison, copying, samplers, summary, values
from ddp_notebook.records import logs
from ddp_notebook.registry import private
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import asyncio, contextlib, faulthandler, json, os, queue, re, threading, time
from ddp_notebook.wire.buffers import join as join_parts
from ddp_notebook.wire.bulk import INLINE_BYTES, unpickled
from ddp_notebook.wire.shared_memory import SealedMemory, open_at

_CELL = re.compile(rb'\["RunCell", \{"cell": (\d+)')
_MOST_WAITING = 50  # maximum of unacknowledged messages; above it no further batch is sent


class Rank:
    """One rank: its place in the group, its agent and its engine."""

    def __init__(self, spec: RankSpec) -> None:
        kernel_api.settle_environment()
        self.place: Form | None = None
        self.runner: Runner | None = None
        self._directory = spec.directory
        self._session = spec.mark_token
        self._streams = Streams(spec.mark_token)
        self._inbox = Inbox(spec.inbox, self._handle, self._on_lost_cell)
        self._calling = threading.Lock()
        self._forming = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background: BackgroundCode | None = None  # from `adopt` on
        self._to_do: queue.SimpleQueue[Message] = queue.SimpleQueue()  # messages before the loop runs
        self.agent = RankAgent(
            spec.address, spec.process, on_message=self._on_message, vitals=self._vitals, on_asked=self._on_asked
        )
        self._network = Network()
        self._core = Core(
            self._network,
            send=self.agent.send,
            answer=self._answer,
            place=lambda: self.place,
            take_place=self._take_place,
            running=lambda: None if self.runner is None else self.runner.running,
            is_busy=lambda: self.agent.endpoint.waiting() > _MOST_WAITING,
            hand_on=self._on_message,
        )
        self._hooks = Hooks(self._core)
        # Handlers of messages. In the agent's thread, a handler that returns True is the last one called. The main
        # thread can handle cells once there is an engine.
        self._at_once: dict[type[Message], list[Callable[[Any], object]]] = {}
        for kind, at_once in [*self._hooks.handlers("at_once"), *self._core_at_once()]:
            self._at_once.setdefault(kind, []).append(at_once)
        self._in_main: dict[type[Message], Callable[[Any], object]] = {Form: self._take_place}
        self.agent.start()

    def serve(self) -> None:
        """Run the main thread: wait for the place in the group, then serve as an engine until the end."""
        message = self._to_do.get()
        while not isinstance(message, Engine):
            self._handle(message)
            message = self._to_do.get()
        profile = os.path.join(self._directory, "profile")
        private.restore(profile)  # ipyparallel does not create this folder
        settings = {
            "id": message.engine_id,
            "enable_nanny": False,  # the host server is the parent process: it detects the end of this one
            "max_heartbeat_misses": 0,  # a lost controller must not end the rank
            "timeout": 60,
        }
        app = RankEngine.instance(
            rank=self,
            connection_info_env=json.dumps(message.connection),
            config=Config(ProfileDir=Config(location=profile), IPEngine=Config(settings)),
        )
        umask = os.umask(0o077)  # IPython makes folders in its profile
        try:
            app.initialize([])
        finally:
            os.umask(umask)
        app.start()

    def adopt(self, app: RankEngine) -> None:
        """Prepare to run cells: the engine has its kernel."""
        assert self.place is not None
        self.runner = Runner(
            app.kernel,
            self._streams,
            self._network,
            self._hooks,
            self.agent.send,
            world_size=lambda: 1 if self.place is None else self.place.world_size,
        )
        runner = self.runner
        shell = app.kernel.shell
        self.agent.endpoint.on_tick = StoppedChildren(
            self._network.children, lambda: (runner.running or (0, 0.0))[0], self.agent.send
        ).poll
        script_functions.install(self._core.place, self._core.running)
        self._hooks.engine_ready(shell)
        commands.install(
            shell,
            self._network.children,
            names=lambda: () if self.place is None else join.of_torchrun(self.place),
            place=lambda: (0, 1) if self.place is None else (self.place.rank, self.place.local_world_size),
            cell=lambda: (runner.running or (0, 0.0))[0],
            folder=self._directory,
            session=self._session,
        )
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_report)
        recorder = self._network.recorder
        self._background = BackgroundCode(self._network.where, lambda: set(recorder.waiting))
        self._loop.time = time.monotonic  # type: ignore[method-assign]  # a cell may replace the one in `time`
        self._name_place()
        self._in_main = self._handlers(runner)
        self._loop.add_reader(self._inbox.fileno(), self._read_inbox)
        runner.keep_reader(self._inbox.fileno(), self._read_inbox)
        while not self._to_do.empty():
            self._on_message(self._to_do.get())
        isolation.protect_exits()
        runner.keep_modules()
        self._loop.call_soon(self.agent.send, Ready())

    def _handlers(self, runner: Runner) -> dict[type[Message], Callable[[Any], object]]:
        """Return the main thread's handlers for the time when cells can run."""

        def in_turn(answer: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], object]:
            answer_in_phase = partial(internal_phases.answer_request, answer)
            return lambda message: kernel_api.run_in_turn(RankEngine.instance().kernel, answer_in_phase, message)

        return {
            RunCell: runner.submit,
            Form: self._take_place,
            Comm: runner.deliver,
            Register: self._register,
            Pull: in_turn(self._pull),
            Push: in_turn(self._push),
            Check: in_turn(self._check),
            **dict(self._hooks.handlers("in_main_thread")),
            **{kind: in_turn(answer) for kind, answer in self._hooks.handlers("questions")},
        }

    # ---- the agent's thread

    def _core_at_once(self) -> list[tuple[type[Message], Callable[[Any], object]]]:
        """Return the core's handlers in the agent's thread. They come after those of features."""
        return [
            (Lost, self._lose),
            (Interrupt, self._tell_runner),
            (InputReply, self._tell_runner),
            (Taken, self._tell_runner),
            (Peek, self._answer_at_next_step),
            (Pull, self._answer_at_next_step),
        ]

    def _on_message(self, message: Message) -> None:
        """Call the handlers of the agent's thread. The main thread, which may be stuck, handles all other messages
        later."""
        for handle in self._at_once.get(type(message), ()):
            if handle(message):
                return
        if self._loop is None:
            self._to_do.put(message)
        else:
            self._call_in_main(self._handle, message)

    def _call_in_main(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function in the event loop of the main thread, even if a cell has replaced functions of asyncio."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except Exception:
            if not self.put_modules_back():
                raise
            self._loop.call_soon_threadsafe(function, *args)

    def _lose(self, message: Lost) -> bool:
        self._network.on_message(message)
        for lost in self._hooks.ranks_lost:
            lost()
        return True

    def _tell_runner(self, message: Interrupt | InputReply | Taken) -> bool:
        if self.runner is not None:
            self.runner.on_message(message)
        return True

    def _answer_at_next_step(self, message: Peek | Pull) -> bool:
        """Answer between two steps of the running cell.

        If no cell runs, the kernel answers between cells, or a cell that starts before that answers at its first step.

        Returns:
            False if a `Pull` message is not meant for a step, or if the rank cannot run cells yet.
        """
        if self.runner is None or (isinstance(message, Pull) and not message.at_step):
            return False
        is_in_cell = self._core.between.put(partial(self._at_step, message))
        if not is_in_cell and self._loop is not None:
            kernel = RankEngine.instance().kernel
            self._call_in_main(kernel_api.run_in_turn, kernel, self._answer_between_cells)
        return True

    def _on_asked(self, *, flush: bool) -> None:
        for on_asked in self._hooks.on_asked:
            on_asked(flush)

    def _vitals(self, *, with_shortages: bool) -> dict[str, Any]:
        cell, since = (self.runner and self.runner.running) or (0, time.monotonic())
        # The current device of this thread is always device 0.
        device = None if self.place is None or self.place.device == "cpu" else self.place.device
        fields = {
            "device_bytes": gpu.reserved_bytes(device),
            "running_cell": cell,
            "running_s": time.monotonic() - since,
            "shortages": shortage.now() if with_shortages else [],
            "client_call_s": 0.0 if self.runner is None else self.runner.client_call_s,
            "phase": internal_phases.current(),
        }
        try:
            return fields | reserve.use(self._program_state) | {"background": "" if cell else self._in_background()}
        except Exception as error:  # for example, a cell has replaced a function that a library calls
            return fields | {"unread": with_type(error)}

    def _in_background(self) -> str:
        """Describe user code that may start operations although no cell runs; "" if there is none."""
        if self.runner is None or self._background is None:
            return ""
        return "a call of session.client" if self.runner.is_for_client else self._background.words()

    def _program_state(self) -> dict[str, Any]:
        """Return the fields of `Vitals` that describe the user's program."""
        state = self._network.vitals()
        for vitals in self._hooks.vitals:
            state.update(vitals())
        return state

    # ---- the main thread

    def _read_inbox(self) -> None:
        assert self._loop is not None
        self.put_replaced_back()
        if not self._inbox.read():
            self._loop.remove_reader(self._inbox.fileno())

    def put_replaced_back(self) -> bool:
        """See `Runner.put_replaced_back`."""
        return self.runner is not None and self.runner.put_replaced_back()

    def put_modules_back(self) -> bool:
        """Restore what the event loop needs after it has failed. Return whether anything was restored."""
        if self.runner is None:
            return False
        builtins_changed = self.runner.put_replaced_back()
        return self.runner.put_modules_back("the event loop of this rank failed") or builtins_changed

    def _on_lost_cell(self, head: bytes, error: Exception) -> None:
        """End a cell that could not begin. Otherwise the notebook would wait for it.

        Args:
            head: first bytes of the message.
            error: MemoryError, or the exception of a function that an earlier cell has replaced.
        """
        if (found := _CELL.match(head)) and self.runner is not None:
            self.runner.lose(int(found[1]), error)

    def _handle(self, message: Message) -> None:
        if (handle := self._in_main.get(type(message))) is not None:
            handle(message)

    def _register(self, message: Register) -> None:
        engine = RankEngine.instance()
        why = engine.enroll(message.engine_id, replaces=message.replaces, reached_at=message.reached_at)
        self.agent.send(Registered(error=why))

    def _take_place(self, place: Form) -> None:
        """Take a place in the group, and start a thread that forms the group.

        Forming mostly waits, so the engine starts at the same time. With 64 ranks on two cores this takes 8 s instead
        of 13 s.
        """
        self.place = place
        try:
            shortage.settle(place.rank)
            reserve.hold(place.world_size)
            thread_count.give(place.threads)
            join.enter(place)
            if self.runner is not None:
                self._name_place()
            thread = threading.Thread(target=self._form, args=(place,), name="ddp-form", daemon=True)
            reserve.use(thread.start)
        except Exception as error:  # no thread can be started, or a cell has replaced a function of torch
            self.agent.send(Formed(epoch=place.epoch, error=_in_words(error)))

    def _form(self, place: Form) -> None:
        with reserve.lent():
            self._form_with_reserve(place)

    def _form_with_reserve(self, place: Form) -> None:
        with self._calling:  # one thread at a time closes connections
            if self.place is not place:  # a later group may be connected already: leave its connections open
                return
            self._network.take_over(self._forming)
        try:
            if self.place is not place:
                return  # a later epoch has started
            notes = self._network.form(place, self._hooks.group_forms, self._hooks.group_formed)
        except Exception as error:
            lacks_others = not shortage.now() and is_timeout_of_store(error)
            why = f"other ranks did not join within {place.form_timeout_s:g} s" if lacks_others else _in_words(error)
            self.agent.send(Formed(epoch=place.epoch, error=why, lacks_others=lacks_others))
        else:
            self.agent.send(Formed(epoch=place.epoch, notes=notes))
        finally:
            self._forming.release()

    def _name_place(self) -> None:
        """Set the variables that every cell finds."""
        assert self.place is not None and self.runner is not None
        place = self.place
        self.runner.names = {
            "rank": place.rank,
            "local_rank": place.local_rank,
            "world_size": place.world_size,
            "device": torch.device(place.device),
            "torch": torch,
            "dist": dist,
        }
        names = RankEngine.instance().kernel.shell.user_ns
        names.update(self.runner.names)
        for name, value in self._hooks.variables().items():
            if name not in names or logs.is_log(names[name]):  # else the user's, from math for example
                names[name] = value
            self.runner.names[name] = value

    async def _answer_between_cells(self) -> None:
        self._core.between.run_outside()

    def _at_step(self, message: Peek | Pull, variables: Mapping[str, Any], steps: int) -> None:
        """Answer between two steps of a cell.

        Args:
            variables: variables of the user's functions that called the optimizer. They hide those of the cell.
            steps: number of steps of the cell so far; -1 if no cell runs.
        """
        try:
            namespace = {**RankEngine.instance().kernel.shell.user_ns, **variables}
            if isinstance(message, Peek):
                text = unseen(values.peek, message.expression, namespace)
                self.agent.send(Pulled(request=message.request, about=text, steps=steps))
                return
            kind = values.unsafe(namespace.get(message.name)) if steps >= 0 else ""
            if kind:
                self.agent.send(Pulled(request=message.request, waits_for_cell=kind))
                return
            parts, about = unseen(values.read, namespace, message.name, force=message.force, is_safe=message.safe)
        except values.CannotSendError as error:
            self.agent.send(Pulled(request=message.request, error=str(error)))
        except BaseException as error:  # from a user's object, or an interrupt; the notebook waits for an answer
            self.agent.send(Pulled(request=message.request, error=with_type(error)))
            if isinstance(error, KeyboardInterrupt | FormattingStopped):  # a SystemExit must not end the job
                raise
        else:
            self._answer(message.request, join_parts(parts), about, message.memory)

    async def _pull(self, message: Pull) -> None:
        shell = RankEngine.instance().kernel.shell
        try:
            if message.names is None:
                parts, about = unseen(
                    values.read, shell.user_ns, message.name, force=message.force, is_safe=message.safe
                )
            else:
                parts, names, left = unseen(
                    copying.read, shell.user_ns, message.names, shell.user_ns_hidden, copying.pickled
                )
                about = json.dumps({"names": names, "left": left})
        except values.CannotSendError as error:
            self.agent.send(Pulled(request=message.request, error=str(error)))
            return
        except (Exception, SystemExit) as error:  # from a user's object; the notebook waits for an answer
            self.agent.send(Pulled(request=message.request, error=with_type(error)))
            return
        self._answer(message.request, join_parts(parts), about, message.memory)

    def _answer(self, request: int, chunks: Sequence[Any], about: str = "", memory_name: str = "") -> None:
        nbytes = sum(map(len, chunks))
        answer = Pulled(request=request, about=about, nbytes=nbytes)
        if nbytes <= INLINE_BYTES:
            self.agent.send(replace(answer, data=b"".join(chunks)))
            return
        memory: SealedMemory | None = None
        if memory_name:
            with contextlib.suppress(OSError):  # no shared memory left: the notebook fetches a copy
                memory = SealedMemory(memory_name, chunks)
        transfer = self.agent.bulk.hold(memory or b"".join(chunks))
        self.agent.send(replace(answer, transfer=transfer, memory=memory.place if memory else []))

    async def _push(self, message: Push) -> None:
        namespace = RankEngine.instance().kernel.shell.user_ns
        try:
            had = samplers.there() if message.of_rank >= 0 else []
            data: bytearray | memoryview | None
            if message.transfer:
                data = self.agent.bulk.take(message.transfer)
            elif message.data:
                data = bytearray(message.data)
            else:
                data = open_at(message.memory, str(message.memory[-1]), message.nbytes) if message.memory else None
            if data is None:
                self.agent.send(Pushed(request=message.request, lacks_memory=True))
                return
            namespace.update(unseen(unpickled, data))
            if message.of_rank >= 0 and (place := self.place) is not None:
                before, now = ((rank, place.world_size) for rank in (message.of_rank, place.rank))
                for note in unseen(samplers.resize, before, now, namespace, had):
                    print(f"ddp_notebook: {note}", file=sys.stderr)
        except (Exception, SystemExit) as error:  # from a user's object
            self.agent.send(Pushed(request=message.request, error=with_type(error)))
        else:
            self.agent.send(Pushed(request=message.request))

    async def _check(self, message: Check) -> None:
        namespace = RankEngine.instance().kernel.shell.user_ns
        facts: dict[str, Any]
        try:
            if message.whole:
                facts = {name: {} for name in unseen(comparison.whole_loaders, namespace)}
            elif message.entries:
                facts = unseen(summary.samples, namespace, message.entries)
            else:
                facts = unseen(summary.fingerprints, namespace, message.names)
                for more in self._hooks.facts:
                    if found := unseen(more, namespace):
                        facts[""] = {**facts.get("", {}), **found}  # facts that belong to no variable
        except (Exception, SystemExit) as error:  # from a user's object
            self.agent.send(Checked(request=message.request, error=with_type(error)))
        else:
            self.agent.send(Checked(request=message.request, facts=facts))


def _in_words(error: BaseException) -> str:
    """Return why the group did not form. Exhausted resources come first."""
    return "; ".join([*shortage.now(), with_type(error)])


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an exception of a callback or task of the event loop, as asyncio does.

    A cell may have replaced functions that asyncio's report needs, for example those of logging. An exception in the
    report would end the rank.
    """
    try:
        loop.default_exception_handler(context)
    except Exception:
        pass


def main(spec: RankSpec, threads_of_torch: int) -> None:
    """Run a rank, from the first step after the fork (or spawn) to its end."""
    faulthandler.enable(file=2, all_threads=False)  # a segmentation fault writes its Python lines to the last output
    own_signals.write_stacks_to(spec.stack_file)
    signal_handlers.begin()
    thread_count.give(threads_of_torch)
    pymp.settle(spec.pymp_folder)
    sys.argv = ["rank"]
    Rank(spec).serve()
