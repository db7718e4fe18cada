"""Backends of RPC: TensorPipe, whose agent stays in the process, and backends that a program registers.

`register_backend` creates the enumeration of backends again, and torch keeps members of the old one: from then on its
`init_rpc` refuses all of them, also the default. `find` accepts members of both. A registered backend is called for an
agent as in torch; if it calls the handler of TensorPipe, it gets the agent of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_rpc import RpcBackendOptions
from torch.distributed import rpc
from torch.distributed.rpc import backend_registry

from ddp_notebook.rank.replacing import replace

_TENSORPIPE = "TENSORPIPE"
original_handler = backend_registry._tensorpipe_init_backend_handler


def install(handler: Callable[..., Any]) -> None:
    """Put a handler in place of the one that makes TensorPipe's agent."""
    replace(original_handler, handler)
    member: Any = backend_registry.BackendType[_TENSORPIPE]
    member._value_ = member.value._replace(init_backend_handler=handler)


def find(backend: Any, options: Any) -> Any:
    """The backend that `init_rpc` is to use.

    Args:
        backend: as `init_rpc` was given it, or None.
        options: likewise.

    Raises:
        TypeError: they are of other kinds, in torch's words.
    """
    if backend is not None and not isinstance(backend, rpc.BackendType | backend_registry.BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {type(options).__name__}"
        )
    if backend is not None:
        return backend
    tensorpipe = backend_registry.BackendType[_TENSORPIPE]
    if options is None or isinstance(options, rpc.TensorPipeRpcBackendOptions):
        return tensorpipe
    for candidate in backend_registry.BackendType:
        if isinstance(options, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def is_tensorpipe(backend: Any) -> bool:
    """Return True for the TensorPipe backend."""
    return bool(backend.name == _TENSORPIPE)
