"""The rank as an ipyparallel engine that needs no controller. Output of the rank's own cells stays in its pipes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import zmq
from ipykernel.iostream import OutStream
from ipyparallel.engine.app import IPEngine
from traitlets import default

from ddp_notebook.rank import shortage
from ddp_notebook.rank.cell import kernel_api, signal_handlers
from ddp_notebook.rank.cell.interpreter import write_to_stderr
from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import logging, os, signal
from ddp_notebook.wire.signals import END, INTERRUPT

if TYPE_CHECKING:
    from ddp_notebook.rank.process import Rank

_OF_REGISTRATION = ["self", "msg", "connect", "maybe_tunnel"]
_UNREGISTER_MS = 5000  # time limit for the controller to remove an engine
_NEEDED_DESCRIPTORS = 20  # for the first registration; measured: 14 stay open
_LATER_DESCRIPTORS = 4  # for a further registration
_LINGER_MS = 20_000  # time limit for the registration to reach the controller


class RankEngine(IPEngine):
    """ipyparallel engine of a rank, for `%%px` and for this package's cells.

    It needs no controller at first. Its kernel is made as ipyparallel makes one after a registration. `enroll` connects
    its sockets later.
    """

    def __init__(self, *, rank: Rank | None = None, **kwargs: Any) -> None:
        log = logging.Logger(type(self).__name__, logging.CRITICAL)  # traitlets would configure all of `logging`
        log.addHandler(logging.StreamHandler())
        super().__init__(log=log, **kwargs)
        self._rank = rank
        self._connect: Callable[..., Any] | None = None  # ipyparallel's function that connects a socket to an address
        self._unconnected: list[tuple[Any, str, dict[str, Any]]] = []  # socket, address, and options of the connection
        self._at_leaves: tuple[Any, set[str]] | None = None  # the broadcast socket, and its connected addresses
        self._heart: tuple[Any, ...] = ()
        self._is_to_end = False
        self._publishers: dict[str, Any] = {}  # publishers of `%%px` output, by stream or kind of output

    @default("work_dir")
    def _where_the_rank_is(self) -> str:
        """Return the current directory.

        ipyparallel would return the directory in which its module was imported: that of the host server at that time.
        """
        return os.getcwd()

    @default("out_stream_factory")
    def _what_takes_text(self) -> type:
        return _TextOfPx

    def parse_command_line(self, argv: Any = None) -> None:
        """Parse nothing: there is no command line, and the parser of an engine's options takes 20 ms to make."""

    def init_signal(self) -> None:
        """Let the SIGTERM handler of ipyparallel run when the host server stops this rank.

        The runner handles SIGINT.
        """
        super().init_signal()
        stop = signal.getsignal(signal.SIGTERM)
        assert callable(stop)
        signal_handlers.end_by(self._before(stop))

    def _before(self, ends: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `ends`. After that call, `start` no longer restarts the event loop."""

        @wraps(ends)
        def end(*args: Any) -> Any:
            self._is_to_end = True
            return ends(*args)

        return end

    def start(self) -> None:
        """Serve until the host server or a client stops the engine.

        The event loop restarts if a callback of a cell stops it or raises SystemExit. It also restarts if it failed
        after a cell or a thread replaced a function that it needs.
        """
        loop: Any = self.loop
        run = loop.asyncio_loop.run_forever

        def run_forever() -> None:
            while not self._is_to_end:
                try:
                    run()
                except SystemExit:
                    if self._is_to_end or not self._publishers:
                        raise
                    write_to_stderr("ddp_notebook: SystemExit in a callback of the event loop does not end a rank")
                except Exception:
                    if self._is_to_end or self._rank is None or not self._rank.put_modules_back():
                        raise
                if not self._publishers:  # ipyparallel stopped the loop: the kernel does not exist yet
                    return

        loop.asyncio_loop.run_forever = run_forever
        super().start()

    async def _start(self) -> None:
        """Run the engine. From ipyparallel 9 on, the event loop runs this coroutine, which may fail."""
        try:
            await super()._start()
        finally:
            self._is_to_end = True

    def register(self) -> Any:
        """Make the kernel as if the controller had answered.

        Returns:
            A coroutine from ipyparallel 9 on.
        """
        if not can_wait():
            return super().register()
        self._connect, maybe_tunnel = self.init_connector()
        reply = self.session.msg("registration_reply", content={"status": "ok", "id": self.id, "hb_period": 0})
        answered = self.session.serialize(reply), self._connect_later, maybe_tunnel
        if inspect.iscoroutinefunction(self.complete_registration):
            return self._make_kernel(answered)
        return self.loop.add_callback(self.complete_registration, *answered)  # 8 expects the answer later

    async def _make_kernel(self, answered: tuple[Any, ...]) -> None:
        with kernel_api.without_modules():
            await self.complete_registration(*answered)

    def _connect_later(self, socket: Any, address: str, **options: Any) -> None:
        self._unconnected.append((socket, address, options))
        if address in self._leaves():
            self._at_leaves = socket, {address}

    def _leaves(self) -> list[str]:
        """Return the addresses of the broadcast schedulers of ipyparallel. Each serves some engine ids."""
        connection = self.connection_info
        return [f"{connection['interface']}:{port}" for port in connection["broadcast"]]

    def _other_leaf(self, engine_id: int) -> list[tuple[Any, str, dict[str, Any]]]:
        """Return the connection to add if the new engine id belongs to another broadcast scheduler."""
        leaves = self._leaves()
        leaf = leaves[engine_id % len(leaves)]
        if self._at_leaves is None or leaf in self._at_leaves[1]:
            return []
        self._at_leaves[1].add(leaf)
        return [(self._at_leaves[0], leaf, {})]

    def start_heartbeat(self, *heart: Any) -> None:
        """Start the heartbeat, or store its addresses until there is a controller."""
        if self._connect is None:
            super().start_heartbeat(*heart)
        else:
            self._heart = heart

    def enroll(self, engine_id: int, *, replaces: bool, reached_at: Mapping[str, str]) -> str:
        """Connect to the new controller and register. The thread that uses a socket also connects it.

        Args:
            engine_id: number of the rank, which may differ from the earlier one.
            replaces: unregister the engine of a dead rank first, as its nanny process would. Otherwise the controller
                takes minutes to miss that engine, and gives this one another id.
            reached_at: for each address of the controller that differs on this host, the address to connect to.

        Returns:
            The reason why the engine cannot connect, as a sentence; the call can then be repeated. "" on success.
        """
        if self._connect is None:  # the engine has registered as ipyparallel does it
            return ""
        # ZeroMQ would abort this process if it found no descriptor for the sockets of the heartbeat. The reserve does
        # not help: if the controller is still starting, sockets open their descriptors only when it listens.
        needed = _NEEDED_DESCRIPTORS if self._heart else _LATER_DESCRIPTORS
        if why := shortage.of_descriptors(needed, "ipyparallel's engine"):
            return why
        self._enroll(engine_id, replaces=replaces, reached_at=reached_at)
        return ""

    def _enroll(self, engine_id: int, *, replaces: bool, reached_at: Mapping[str, str]) -> None:
        assert self._connect is not None
        if engine_id != self.id:
            self._unconnected += self._other_leaf(engine_id)
            self.set_trait("id", engine_id)
            self.kernel.engine_id = engine_id
            self._name_topics()
        in_thread = {str(self.connection_info[name]): call for name, call in _threads(self.kernel).items()}
        for socket, address, options in self._unconnected:
            call = in_thread.get(address.rpartition(":")[2], _here)
            call(partial(self._connect, socket, reached_at.get(address, address), **options))
        self._unconnected.clear()
        if self._heart:
            ping, pong, *rest = self._heart
            super().start_heartbeat(reached_at.get(ping, ping), reached_at.get(pong, pong), *rest)
            self._heart = ()
        with self.context.socket(zmq.DEALER) as registrar:
            registrar.linger = _LINGER_MS
            self._connect(registrar, reached_at.get(self.registration_url, self.registration_url))
            if replaces:
                self.session.send(registrar, "unregistration_request", content={"id": self.id})
                self.session.send(registrar, "connection_request")  # its reply comes after the unregistration
                registrar.poll(_UNREGISTER_MS)
            self.session.send(registrar, "registration_request", content={"uuid": self.ident, "id": self.id})

    def _complete_registration(self, *args: Any) -> None:
        """Complete the registration, but keep the standard streams.

        Only ipyparallel 8 calls this. It replaces the streams itself and does not call `redirect_output`.
        """
        before = sys.stdout, sys.stderr
        with kernel_api.without_modules():
            super()._complete_registration(*args)
        sys.stdout, sys.stderr = before
        self.redirect_output(self.kernel.iopub_socket)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Capture the text of cells that ipyparallel runs. This is the last step of registration.

        ipyparallel would send all text to its client. Text of this package's cells goes to the pipes.
        """
        streams = {name: _TextOfPx(self.session, iopub_socket, name) for name in ("stdout", "stderr")}
        hook = self.display_hook_factory(self.session, iopub_socket)
        self._publishers = {**streams, "execute_result": hook, "displaypub": self.kernel.shell.display_pub}
        self._name_topics()
        sys.displayhook = hook
        assert self._rank is not None
        _capture_text(self.kernel, streams, self._rank.put_replaced_back)
        self.kernel.control_handlers["signal_request"] = self._on_signal_request
        self.kernel.do_shutdown = self._before(self.kernel.do_shutdown)
        self._rank.adopt(self)

    def _name_topics(self) -> None:
        for name, publisher in self._publishers.items():
            publisher.topic = f"engine.{self.id}.{name}".encode()

    def restore_output(self) -> None:
        """Do nothing: the standard streams were never replaced."""

    def _on_signal_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Handle `Client.send_signal` and the interrupt of `%%px` in place of the nanny process of ipyparallel."""
        sent = parent["content"]["sig"]
        number = getattr(signal, sent) if isinstance(sent, str) else sent
        os.kill(os.getpid(), {signal.SIGINT: INTERRUPT, signal.SIGTERM: END}.get(number, number))
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent=parent, ident=ident)


def can_wait() -> bool:
    """Return whether this version of ipyparallel can make engines before there is a controller."""
    return list(inspect.signature(IPEngine.complete_registration).parameters) == _OF_REGISTRATION


def _here(call: Callable[[], object]) -> None:
    call()


def _threads(kernel: Any) -> dict[str, Callable[[Callable[[], object]], object]]:
    """Return, by name of a kernel's socket, the function that schedules calls in its thread. Main-thread sockets are
    absent."""
    threads: dict[str, Callable[[Callable[[], object]], object]] = {"iopub": kernel.iopub_socket.schedule}
    if (control := getattr(kernel, "control_thread", None)) is not None:
        threads["control"] = control.io_loop.add_callback
    return threads


class _TextOfPx(OutStream):
    """Output stream that sends text to the ipyparallel client. It leaves fd 1 and 2 to the pipes."""

    def __init__(self, session: Any, iopub: Any, name: str) -> None:
        super().__init__(session, iopub, name, watchfd=False)


def _capture_text(kernel: Any, streams: dict[str, Any], put_replaced_back: Callable[[], object]) -> None:
    """Send the text of `%%px` cells and `apply` calls to the ipyparallel client.

    Args:
        put_replaced_back: called after each of them, before ipykernel sends the reply.
    """

    class to_client:
        def __enter__(self) -> None:
            self.saved = sys.stdout, sys.stderr
            for stream in streams.values():
                stream.set_parent(kernel.shell.parent_header)
            sys.stdout, sys.stderr = streams["stdout"], streams["stderr"]

        def __exit__(self, *_: object) -> None:
            put_replaced_back()
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
