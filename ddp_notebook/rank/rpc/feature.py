"""RPC feature of a rank: cells can repeat `init_rpc`, remote calls are recorded, and a stop ends them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed import rpc

from ddp_notebook.messages.encoding import Message
from ddp_notebook.messages.ranks import Interrupt
from ddp_notebook.rank.hooks import Core, Feature
from ddp_notebook.rank.patching import replace
from ddp_notebook.rank.rpc.serving import Serving
from ddp_notebook.records import switches
from ddp_notebook.stdlib import contextlib, functools, threading

_PACKAGE = "ddp_notebook.rank.rpc"


class RpcFeature(Feature):
    """Remote calls between ranks, in cells that may be run again."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._serving: Serving | None = None  # None if torch lacks RPC or its version is unknown
        self._main = threading.main_thread().ident or 0

    @classmethod
    def prepare(cls) -> Iterable[Callable[..., Any]]:
        if not rpc.is_available():
            return []
        for name in ("rpc_functions", *(() if "recording" in switches.without() else ("record.rpc_recorder",))):
            with contextlib.suppress(AttributeError, ImportError):  # reported by `engine_ready`
                importlib.import_module(f"{_PACKAGE}.{name}")
        from torch.distributed.rpc import backend_registry

        replaced: list[Callable[..., Any]] = [rpc.init_rpc, rpc.shutdown, rpc.get_worker_info]
        replaced.append(backend_registry._tensorpipe_init_backend_handler)
        with contextlib.suppress(AttributeError, ImportError):
            from ddp_notebook.rank.rpc.context_ids import originals

            replaced += originals.values()
        return replaced

    def engine_ready(self) -> None:
        """Replace the RPC functions of torch, so that cells can be run again.

        With an unknown torch, keep them and print a line.
        """
        if not rpc.is_available():
            return
        core = self.core
        try:
            from ddp_notebook.rank.rpc.rpc_functions import RpcFunctions

            face = RpcFunctions(core.place, core.running, lambda: core.network.release.loss)
        except (AttributeError, ImportError) as missing:
            replace(rpc.init_rpc, _once(rpc.init_rpc, str(missing)))
            return
        face.install()
        self._serving = core.network.where.serving = face.serving
        if core.recording is None:
            return
        try:
            from ddp_notebook.rank.rpc.record.rpc_recorder import RpcRecorder

            RpcRecorder(face, core.recording.training).install()
        except (AttributeError, ImportError) as missing:
            print(
                f"ddp_notebook does not support this version of torch ({missing}): remote calls are not recorded",
                file=sys.stderr,
            )

    def at_once(self) -> Mapping[type[Message], Callable[[Any], object]]:
        return {Interrupt: self._stop}

    def _stop(self, message: Interrupt) -> None:
        if self._serving is not None:
            self._serving.stop(message.cell)

    def vitals(self) -> Mapping[str, Any]:
        serving = self._serving
        return {} if serving is None else {"remote": serving.to_json(self._main, self.core.network.where.describe)}

    def unheld_limits(self) -> Sequence[str]:
        return () if self._serving is None else self._serving.calls.open()


def _once(init_rpc: Callable[..., None], missing: str) -> Callable[..., None]:
    @functools.wraps(init_rpc)
    def with_a_line(*args: Any, **kwargs: Any) -> None:
        init_rpc(*args, **kwargs)
        print(
            f"init_rpc: ddp_notebook does not support this version of torch ({missing}); "
            "remote references work only after the first init_rpc of a rank"
        )

    return with_a_line


FEATURE = RpcFeature
