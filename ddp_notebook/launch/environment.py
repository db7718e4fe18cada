"""Environment variables of a rank, and those that have no effect after the import of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

# These are read while a module is imported, or by the dynamic loader and Python itself at their start. A rank that is
# forked after the imports would silently ignore a new value.
_READ_AT_IMPORT = (
    "TORCH", "PYTORCH", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "PYTHON", "LD_", "DYLD_",
    "TMPDIR", "TEMP", "TMP", "MPL", "IPYTHONDIR", "JUPYTER_", "NPY_", "LANG", "LC_", "TZ", "TRITON_",
    "MALLOC_", "GLIBC_TUNABLES", "PYDEVD_", "DEBUGPY_", "DDP_NOTEBOOK_START_METHOD", "DDP_NOTEBOOK_TEST_WITHOUT",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR",
    "ZE_FLAT_DEVICE_HIERARCHY", "ASCEND_RT_VISIBLE_DEVICES",  # the list of devices depends on these variables
)  # fmt: skip
# The host server must import with one thread. Each rank then raises its own count by a function call.
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def working_directory() -> str:
    """Return the notebook's directory, or the home directory if that one was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.path.expanduser("~")


# From torch 2.15 on, "nccl" is another class, which the stop button has not been tested with. This selects the old
# class.
_OLD_NCCL = {"TORCH_DIST_USE_NCCL2": "0"}
# Variables that ipykernel, ipyparallel and debugpy set if they are missing. They do so while the group forms, which is
# too late, see `rank.cell.kernel_api.settle_environment`.
_OF_ENGINES = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYDEVD_USE_FRAME_EVAL": "NO",
}


def import_time(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be set when a host server starts."""
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_IMPORT) and k not in THREAD_COUNTS}


def host_server_env(env: Mapping[str, str], token_variable: str, token: str) -> dict[str, str]:
    """Return the environment of a host server."""
    return {
        **_OLD_NCCL,
        **_OF_ENGINES,
        **env,
        **dict.fromkeys(THREAD_COUNTS, "1"),
        token_variable: token,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() then creates no context
    }


def threads_per_rank(env: Mapping[str, str], cores: int, local_world_size: int) -> int:
    """Return the number of threads for each rank: the user's setting, else an equal share of the cores."""
    return threads_asked(env) or max(1, cores // local_world_size)


def threads_asked(env: Mapping[str, str]) -> int:
    """Return the number of threads that the user set for each rank; 0 if not set."""
    asked = env.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and len(asked) < 10 else 0


def rank_env(env: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """Return the notebook's environment with the variables that every rank needs. The user's values win.

    NCCL's watchdog only records errors and timeouts: it would otherwise end the process before the session can report
    which rank waited for which.

    Source: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    """
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # the numbering of nvidia-smi, which placed the ranks; the CUDA default is by speed
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        **_OF_ENGINES,
        **_OLD_NCCL,  # for a rank that is not forked and imports torch itself
    }
    return {**defaults, **env}
