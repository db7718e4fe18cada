"""Sentences about two threads that use one group."""

from __future__ import annotations

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401

_CHECKPOINT_THREAD = "AsyncCheckpointExecutor"  # part of the name that torch gives to the thread of `dcp.async_save`


def advice(threads: str, *, is_of_checkpoint: bool = False) -> str:
    """Return the remedy for two threads that use one group.

    Args:
        threads: their names.
        is_of_checkpoint: one of them saves a checkpoint.

    Example:
        >>> advice("the main thread and thread 'Thread-5'")
        'give one of them its own group: group=dist.new_group()'
    """
    if is_of_checkpoint or _CHECKPOINT_THREAD in threads:
        return "give the checkpoint its own group: dcp.async_save(..., process_group=dist.new_group())"
    return "give one of them its own group: group=dist.new_group()"
