"""Errors of RPC. `rank/rpc` reports unknown workers, ended workers and functions that cannot be sent."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised


def _seconds(_: Raised, found: Mapping[str, str]) -> Values:
    return {"seconds": f"{int(found['ms']) / 1000:g}"}


ENTRIES = (
    KnownError(
        name="RPC before init_rpc",
        text="RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.",
        kind="RuntimeError",
        where=r"^torch\.distributed\.rpc\.api:_require_initialized",
        cause="this rank has no RPC worker: it never called init_rpc, or it called shutdown",
        fix="call rpc.init_rpc(f'worker{{rank}}', rank=rank, world_size=world_size) on all ranks",
    ),
    KnownError(
        name="timeout of a call",
        text="RPCErr:1:RPC ran for more than set timeout ({ms:d} ms) and will now be marked with an error",
        kind="RuntimeError",
        where="^$|^torch",
        facts=_seconds,
        cause="the called function did not return within {seconds} s; it may still run on the other worker",
        fix="pass a longer timeout to the call, or timeout=0 for none",
    ),
)
