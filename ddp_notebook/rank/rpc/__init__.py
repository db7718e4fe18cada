"""`torch.distributed.rpc` on a rank, in cells that may be run again.

calls     those that have not returned: what a rank waits for
sending   what becomes of a call from torch's functions on that send it
agent     the one RPC agent of the process, which lives as long as that does
meeting   how workers find each other, at the session's store
functions functions of cells, which a callee may not have yet, or in another version
values    waits for values behind references, and errors for lost ones
waiting   waits in C++, where no stop reaches them
losses    why a call fails whose callee has ended, in words
running   what a callee runs, and what it says of errors
serving   the calls that it runs: they end with the cell of their caller
naming    the workers of one `init_rpc`, by the names and ranks that the cell gave them
context_ids ids of distributed autograd, with ranks in them as in plain torch
backends  backends that a program has registered
face      what cells call: `init_rpc`, `shutdown` and the lookups of workers, in place of torch's

record/   calls, remote references and distributed autograd as rows
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed import rpc

from ddp_notebook.messages.ranks import Form
from ddp_notebook.rank.replacing import replace
from ddp_notebook.rank.rpc.serving import Serving
from ddp_notebook.stdlib import contextlib, functools

if TYPE_CHECKING:
    from ddp_notebook.rank.record.training.stretches import Training


def prepare() -> list[Callable[..., Any]]:
    """Before a fork: import what `install` needs. Returns the functions that it will replace."""
    if not rpc.is_available():
        return []
    for name in ("face", "record.recorder"):
        with contextlib.suppress(AttributeError, ImportError):  # `install` says so
            importlib.import_module(f"{__name__}.{name}")
    from torch.distributed.rpc import backend_registry

    replaced: list[Callable[..., Any]] = [rpc.init_rpc, rpc.shutdown, rpc.get_worker_info]
    replaced.append(backend_registry._tensorpipe_init_backend_handler)
    with contextlib.suppress(AttributeError, ImportError):
        from ddp_notebook.rank.rpc.context_ids import originals

        replaced += originals.values()
    return replaced


def install(
    place: Callable[[], Form | None],
    running: Callable[[], tuple[int, float] | None],
    training: Training,
    loss: Callable[[], BaseException | None],
) -> Serving | None:
    """Let RPC work in cells that are run again. Without what that needs of torch its own stays, and says so. Returns
    the calls that this rank makes and serves.

    Args:
        place: tells the rank's place, which changes when the group is formed anew.
        running: tells the cell that runs, and since when.
        training: of the rank's recording.
        loss: tells what to raise where all ranks are needed and some have died; None: all are there.
    """
    if not rpc.is_available():
        return None
    try:
        from ddp_notebook.rank.rpc.face import Face

        face = Face(place, running, loss)
    except (AttributeError, ImportError) as missing:
        replace(rpc.init_rpc, _once(rpc.init_rpc, str(missing)))
        return None
    face.install()
    try:
        from ddp_notebook.rank.rpc.record.recorder import Recorder

        Recorder(face, training).install()
    except (AttributeError, ImportError) as missing:
        print(f"ddp_notebook does not know this torch ({missing}): remote calls are not recorded", file=sys.stderr)
    return face.serving


def _once(init_rpc: Callable[..., None], missing: str) -> Callable[..., None]:
    @functools.wraps(init_rpc)
    def with_a_line(*args: Any, **kwargs: Any) -> None:
        init_rpc(*args, **kwargs)
        print(f"init_rpc: ddp_notebook does not know this torch ({missing}); remote references work once a rank")

    return with_a_line
