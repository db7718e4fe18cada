"""Operations that gloo does with tensors of a GPU as if they lay in main memory, which ends the process.

Seen on an H200 with torch 2.11: SIGABRT in send and receive, SIGSEGV in the all_gather of functional collectives. The
others copy such tensors to main memory and back, or raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import ProcessGroup

END_THE_PROCESS = frozenset(
    ("send", "recv_", "recv_any_source_", "allgather_coalesced_", "allgather_into_tensor_coalesced_")
)
_GPU = torch.device("cuda")


def refuse(name: str, group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse such an operation.

    Args:
        name: of the operation, as users call it.
        tensors: that it is for.

    Raises:
        RuntimeError: it is one.
    """
    if tensors and tensors[0].is_cuda and group._get_backend(_GPU).name() == "gloo":
        raise RuntimeError(
            f"gloo cannot {name} tensors of a GPU: it would end this process. Move them to main memory, as in "
            f"x.cpu(), or start with NCCL: %ddp_start --backend nccl, with --share-gpus where ranks share a GPU"
        )
