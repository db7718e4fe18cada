"""The number of threads of a rank. torch and NumPy get an equal share of the cores, unless a cell sets another
number."""

from __future__ import annotations

import torch

from ddp_notebook.stdlib import BUILTINS as __builtins__  # type: ignore[no-redef]  # noqa: F401
from ddp_notebook.stdlib import os, threading

_given = 0  # 0 before the first call


def give(count: int) -> None:
    """Set the number of threads. Call it in the main thread. A number that a cell set by `torch.set_num_threads`
    stays."""
    global _given
    if count == _given or (_given and torch.get_num_threads() != _given):
        return
    torch.set_num_threads(count)
    if max(count, _given) > 1:
        from threadpoolctl import threadpool_limits

        threadpool_limits(limits=count, user_api="blas")  # NumPy's pool was made with one thread
    if os.environ.get("OMP_NUM_THREADS") == str(_given):
        os.environ["OMP_NUM_THREADS"] = str(count)  # for child processes
    _given = count


def check_startable(count: int) -> None:
    """Check that this number of threads can be started now, by starting them.

    Raises:
        RuntimeError: they cannot be started, for lack of threads or of memory for their stacks.
    """
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=done.wait, name="ddp-trial", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {len(started)} of {count} threads could be started") from None
    finally:
        done.set()
        for thread in started:
            thread.join()
