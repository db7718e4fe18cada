"""The rank's process: an ipyparallel engine whose main thread forms groups and runs the notebook's cells."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import zmq
from ipykernel.iostream import OutStream
from ipyparallel.engine.app import IPEngine
from traitlets import default

from ddp_notebook.rank.agent import Agent
from ddp_notebook.rank.cell import handlers, kernel_api, tutorials
from ddp_notebook.rank.cell.inbox import Inbox
from ddp_notebook.rank.cell.runner import Runner
from ddp_notebook.rank.cell.streams import Streams
from ddp_notebook.rank.group import join
from ddp_notebook.rank.group.network import Network
from ddp_notebook.rank.record.metrics import is_log
from ddp_notebook.rank.record.recording import RankRecording
from ddp_notebook.rank.unseen import unseen
from ddp_notebook.rank.variables import check, copying, values
from ddp_notebook.records import logs
from ddp_notebook.wire.bulk import INLINE_BYTES
from ddp_notebook.wire.events import (
    Check,
    Checked,
    Comm,
    Engine,
    Form,
    Formed,
    InputReply,
    Interrupt,
    Lost,
    Message,
    Peers,
    Pull,
    Pulled,
    Push,
    Pushed,
    Ready,
    Recorded,
    Register,
    Registered,
    RunCell,
)
from ddp_notebook.wire.signals import END, INTERRUPT, STACK

_MOST_WAITING = 50  # messages that the notebook has not acknowledged, before no further batch is sent
_OF_REGISTRATION = ["self", "msg", "connect", "maybe_tunnel"]
_UNREGISTER_MS = 5000  # what the controller gets to forget an engine
_LINGER_MS = 20_000  # what the controller gets to hear that an engine registers


class Rank:
    """One rank: its place in the group, its agent, and its engine once it has one."""

    def __init__(self, spec: dict[str, Any]) -> None:
        kernel_api.settle_environment()
        self.place: Form | None = None
        self.runner: Runner | None = None
        self._streams = Streams(spec["mark_token"])
        self._inbox = Inbox(spec["inbox"], self._handle)
        self._calling = threading.Lock()
        self._forming = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._to_do: queue.SimpleQueue[Message] = queue.SimpleQueue()  # until the engine's loop runs
        self.agent = Agent(
            spec["address"], spec["process"], on_message=self._on_message, vitals=self._vitals, flush=self._flush
        )
        self._network = Network(self.agent.send)
        self._recording = RankRecording(
            self._network.recorder,
            self._network.where,
            rank=lambda: -1 if self.place is None else self.place.rank,
            send=lambda data: self.agent.send(Recorded(data=data)),
            is_busy=lambda: self.agent.endpoint.waiting() > _MOST_WAITING,
        )
        logs.install(self._recording.metrics.log)
        self.agent.start()

    def serve(self) -> None:
        """The main thread's life: be told the place, then be an engine until the end."""
        message = self._to_do.get()
        while not isinstance(message, Engine):
            self._handle(message)
            message = self._to_do.get()
        app = RankEngine.instance(rank=self)
        app.initialize(
            [
                f"--profile-dir={os.path.dirname(os.path.dirname(message.connection_file))}",
                f"--file={message.connection_file}",
                f"--IPEngine.id={message.engine_id}",
                "--IPEngine.enable_nanny=False",  # the host server is our parent: it knows when we die
                "--IPEngine.max_heartbeat_misses=0",  # a lost controller must not end us
                "--IPEngine.timeout=60",
                "--log-level=50",
            ]
        )
        app.start()

    def adopt(self, app: RankEngine) -> None:
        """The engine has its kernel: cells can run from now on."""
        assert self.place is not None
        self.runner = Runner(app.kernel, self._streams, self._network, self._recording, self.agent.send)
        runner = self.runner
        tutorials.install(lambda: self.place, lambda: runner.running)
        self._loop = asyncio.get_running_loop()
        self._name_place()
        self._loop.add_reader(self._inbox.fileno(), self._read_inbox)
        while not self._to_do.empty():
            self._on_message(self._to_do.get())
        self._loop.call_soon(self.agent.send, Ready())

    # ---- the agent's thread

    def _on_message(self, message: Message) -> None:
        """What the main thread cannot do, which may be stuck, is done here; the rest it does in its turn."""
        if isinstance(message, Peers | Lost):
            self._network.on_message(message)
        elif isinstance(message, Interrupt | InputReply):
            if self.runner is not None:
                self.runner.on_message(message)
        elif self._loop is None:
            self._to_do.put(message)
        else:
            self._loop.call_soon_threadsafe(self._handle, message)

    def _flush(self) -> None:
        self._recording.drain.flush()

    def _vitals(self) -> dict[str, Any]:
        cell, since = (self.runner and self.runner.running) or (0, time.monotonic())
        # The current device of this thread is always the first.
        device = None if self.place is None or self.place.device == "cpu" else self.place.device
        return {
            "device_bytes": torch.cuda.memory_reserved(device) if torch.cuda.is_initialized() else 0,
            "running_cell": cell,
            "running_s": time.monotonic() - since,
            **self._network.vitals(),
        }

    # ---- the main thread

    def _read_inbox(self) -> None:
        assert self._loop is not None
        if not self._inbox.read():
            self._loop.remove_reader(self._inbox.fileno())

    def _handle(self, message: Message) -> None:
        if isinstance(message, Form):
            self._take(message)
        elif isinstance(message, RunCell) and self.runner is not None:
            self.runner.submit(message)
        elif isinstance(message, Pull) and self.runner is not None:
            kernel_api.run_in_turn(RankEngine.instance().kernel, self._pull, message)
        elif isinstance(message, Comm) and self.runner is not None:
            self.runner.deliver(message)
        elif isinstance(message, Push) and self.runner is not None:
            kernel_api.run_in_turn(RankEngine.instance().kernel, self._push, message)
        elif isinstance(message, Check) and self.runner is not None:
            kernel_api.run_in_turn(RankEngine.instance().kernel, self._check, message)
        elif isinstance(message, Register):
            RankEngine.instance().enroll(replaces=message.replaces)
            self.agent.send(Registered())

    def _take(self, place: Form) -> None:
        """Take a place. The group forms in a thread of its own, since that is mostly waiting: the engine starts
        meanwhile (64 ranks on two cores: 8 s instead of 13)."""
        self.place = place
        join.enter(place)
        if self.runner is not None:
            self._name_place()
        threading.Thread(target=self._form, args=(place,), name="ddp-form", daemon=True).start()

    def _form(self, place: Form) -> None:
        with self._calling:  # a call that is over cuts nothing of a later one
            self._network.take_over(self._forming)
        try:
            if self.place is not place:
                return  # a later epoch has been called meanwhile
            notes = self._network.form(place)
        except Exception as error:
            self.agent.send(Formed(epoch=place.epoch, error=f"{type(error).__name__}: {error}"))
        else:
            self.agent.send(Formed(epoch=place.epoch, notes=notes))
        finally:
            self._forming.release()

    def _name_place(self) -> None:
        """The names that every cell finds."""
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
        log = self._recording.metrics.log
        names = RankEngine.instance().kernel.shell.user_ns
        names.update(self.runner.names)
        if "log" not in names or is_log(names["log"]):  # else it is the user's, from math for example
            names["log"] = log
        self.runner.names["log"] = log

    async def _pull(self, message: Pull) -> None:
        shell = RankEngine.instance().kernel.shell
        try:
            if message.names is None:
                data, about = unseen(values.read, shell.user_ns, message.name, force=message.force)
            else:
                data, names, left = unseen(copying.read, shell.user_ns, message.names, shell.user_ns_hidden)
                about = json.dumps({"names": names, "left": left})
        except values.CannotSendError as error:
            self.agent.send(Pulled(request=message.request, error=str(error)))
            return
        except Exception as error:  # of a user's object; the notebook waits for an answer
            self.agent.send(Pulled(request=message.request, error=f"{type(error).__name__}: {error}"))
            return
        answer = Pulled(request=message.request, about=about, nbytes=len(data))
        if len(data) <= INLINE_BYTES:
            self.agent.send(replace(answer, pickle=data))
        else:
            self.agent.send(replace(answer, transfer=self.agent.bulk.hold(data)))

    async def _push(self, message: Push) -> None:
        namespace = RankEngine.instance().kernel.shell.user_ns
        try:
            namespace.update(unseen(pickle.loads, message.pickle or self.agent.bulk.take(message.transfer)))
        except Exception as error:
            self.agent.send(Pushed(request=message.request, error=f"{type(error).__name__}: {error}"))
        else:
            self.agent.send(Pushed(request=message.request))

    async def _check(self, message: Check) -> None:
        namespace = RankEngine.instance().kernel.shell.user_ns
        facts: dict[str, Any]
        try:
            if message.entries:
                facts = unseen(check.samples, namespace, message.entries)
            else:
                facts = unseen(check.fingerprints, namespace, message.names)
        except Exception as error:
            self.agent.send(Checked(request=message.request, error=f"{type(error).__name__}: {error}"))
        else:
            self.agent.send(Checked(request=message.request, facts=facts))


class RankEngine(IPEngine):
    """An engine that lets `%%px` and our cells live side by side, and needs no controller until somebody asks for one:
    its kernel is made as ipyparallel makes it after a registration, but its sockets are connected by `enroll`."""

    def __init__(self, *, rank: Rank | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rank = rank
        self._connect: Callable[..., Any] | None = None  # a socket to an address, in ipyparallel's way
        self._unconnected: list[tuple[Any, str, dict[str, Any]]] = []  # socket, address, and what its connection needs
        self._heart: tuple[Any, ...] = ()

    @default("work_dir")
    def _where_the_rank_is(self) -> str:
        """ipyparallel goes back to where its module was imported: in the host server, perhaps long ago."""
        return os.getcwd()

    @default("out_stream_factory")
    def _what_takes_text(self) -> type:
        return _TextOfPx

    def init_signal(self) -> None:
        """End as ipyparallel has it at SIGTERM, but when the host server asks for it. SIGINT is the runner's."""
        super().init_signal()
        stop = signal.getsignal(signal.SIGTERM)
        assert callable(stop)
        handlers.end_by(stop)

    def register(self) -> Any:
        """Make the kernel as if the controller had answered.

        Returns:
            From ipyparallel 9 on a coroutine.
        """
        if not can_wait():
            return super().register()
        self._connect, maybe_tunnel = self.init_connector()
        reply = self.session.msg("registration_reply", content={"status": "ok", "id": self.id, "hb_period": 0})
        return self.complete_registration(self.session.serialize(reply), self._connect_later, maybe_tunnel)

    def _connect_later(self, socket: Any, address: str, **options: Any) -> None:
        self._unconnected.append((socket, address, options))

    def start_heartbeat(self, *heart: Any) -> None:
        """Not before there is a controller."""
        if self._connect is None:
            super().start_heartbeat(*heart)
        else:
            self._heart = heart

    def enroll(self, *, replaces: bool) -> None:
        """There is a controller: connect to it, and register. A socket is connected by the thread that uses it.

        Args:
            replaces: take the engine of a rank that has died from its list first, as its nanny process would do: the
                controller would take minutes to miss it, and give us another id.
        """
        if self._connect is None:  # it has registered in ipyparallel's own way
            return
        in_thread = {str(self.connection_info[name]): call for name, call in _threads(self.kernel).items()}
        for socket, address, options in self._unconnected:
            call = in_thread.get(address.rpartition(":")[2], _here)
            call(partial(self._connect, socket, address, **options))
        self._unconnected.clear()
        if self._heart:
            super().start_heartbeat(*self._heart)
            self._heart = ()
        with self.context.socket(zmq.DEALER) as registrar:
            registrar.linger = _LINGER_MS
            self._connect(registrar, self.registration_url)
            if replaces:
                self.session.send(registrar, "unregistration_request", content={"id": self.id})
                self.session.send(registrar, "connection_request")  # which is answered, and after that one
                registrar.poll(_UNREGISTER_MS)
            self.session.send(registrar, "registration_request", content={"uuid": self.ident, "id": self.id})

    def _complete_registration(self, *args: Any) -> None:
        """Of ipyparallel 8, which takes the standard streams by itself, and does not ask `redirect_output`."""
        before = sys.stdout, sys.stderr
        super()._complete_registration(*args)
        sys.stdout, sys.stderr = before
        self.redirect_output(self.kernel.iopub_socket)

    def redirect_output(self, iopub_socket: Any) -> None:
        """The last step of registration. ipyparallel sends all text to its client here; we do so for its own cells
        only, since ours go to the pipes."""
        streams = {name: _TextOfPx(self.session, iopub_socket, name) for name in ("stdout", "stderr")}
        for name, stream in streams.items():
            stream.topic = f"engine.{self.id}.{name}".encode()
        hook = self.display_hook_factory(self.session, iopub_socket)
        hook.topic = f"engine.{self.id}.execute_result".encode()
        sys.displayhook = hook
        _capture_text(self.kernel, streams)
        self.kernel.control_handlers["signal_request"] = self._on_signal_request
        assert self._rank is not None
        self._rank.adopt(self)

    def restore_output(self) -> None:
        """Nothing to restore: the standard streams were never replaced."""

    def _on_signal_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """`Client.send_signal` and the interrupt of `%%px`: ipyparallel's nanny process would answer this."""
        sent = parent["content"]["sig"]
        number = getattr(signal, sent) if isinstance(sent, str) else sent
        os.kill(os.getpid(), {signal.SIGINT: INTERRUPT, signal.SIGTERM: END}.get(number, number))
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent=parent, ident=ident)


def can_wait() -> bool:
    """Whether engines of this ipyparallel can be made before there is a controller."""
    return list(inspect.signature(IPEngine.complete_registration).parameters) == _OF_REGISTRATION


def _here(call: Callable[[], object]) -> None:
    call()


def _threads(kernel: Any) -> dict[str, Callable[[Callable[[], object]], object]]:
    """What calls a function in the thread of a kernel's socket, for those that are not the main thread's."""
    threads: dict[str, Callable[[Callable[[], object]], object]] = {"iopub": kernel.iopub_socket.schedule}
    if (control := getattr(kernel, "control_thread", None)) is not None:
        threads["control"] = control.io_loop.add_callback
    return threads


class _TextOfPx(OutStream):
    """Sends text to ipyparallel's client, and leaves fd 1 and 2 to the pipes."""

    def __init__(self, session: Any, iopub: Any, name: str) -> None:
        super().__init__(session, iopub, name, watchfd=False)


def _capture_text(kernel: Any, streams: dict[str, Any]) -> None:
    """Send the text of `%%px` cells and `apply` calls to ipyparallel's client."""

    class to_client:
        def __enter__(self) -> None:
            self.saved = sys.stdout, sys.stderr
            for stream in streams.values():
                stream.set_parent(kernel.shell.parent_header)
            sys.stdout, sys.stderr = streams["stdout"], streams["stderr"]

        def __exit__(self, *_: object) -> None:
            for stream in streams.values():
                stream.flush()
            sys.stdout, sys.stderr = self.saved

    execute: Callable[..., Any] = kernel.do_execute
    apply: Callable[..., Any] = kernel.do_apply

    async def do_execute(*args: Any, **kwargs: Any) -> Any:
        with to_client():
            return await execute(*args, **kwargs)

    def do_apply(*args: Any, **kwargs: Any) -> Any:
        with to_client():
            return apply(*args, **kwargs)

    kernel.do_execute, kernel.do_apply = do_execute, do_apply


def main(spec: dict[str, Any]) -> None:
    """Be a rank, from the first step after the fork (or spawn) to the end."""
    faulthandler.enable(file=2, all_threads=False)  # a segmentation fault leaves its Python lines among the last words
    if STACK is not None:  # also while the main thread holds the GIL: the handler is in C
        faulthandler.register(STACK, file=open(spec["stack_file"], "a"), all_threads=True)  # noqa: SIM115  # for good
    handlers.begin()
    torch.set_num_threads(spec["threads"])
    if spec["threads"] > 1:
        from threadpoolctl import threadpool_limits

        threadpool_limits(limits=spec["threads"], user_api="blas")  # NumPy's pool was made with one thread
    sys.argv = ["rank"]
    Rank(spec).serve()
