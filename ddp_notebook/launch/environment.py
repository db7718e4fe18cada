"""Which environment a rank gets, and which variables have no effect once torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

# These are read while a module is imported, or by the dynamic loader and Python itself before anything runs. A rank
# that is forked after the imports would silently ignore a new value.
_READ_AT_IMPORT = (
    "TORCH", "PYTORCH", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "PYTHON", "LD_", "DYLD_",
    "TMPDIR", "TEMP", "TMP", "MPL", "IPYTHONDIR", "JUPYTER_", "NPY_", "LANG", "LC_", "TZ", "TRITON_",
    "MALLOC_", "GLIBC_TUNABLES", "PYDEVD_", "DEBUGPY_", "DDP_NOTEBOOK_START_METHOD", "DDP_NOTEBOOK_TEST_WITHOUT",
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR",
    "ASCEND_RT_VISIBLE_DEVICES",  # the list of devices depends on these variables
)  # fmt: skip
# The host server must import with one thread; each rank then raises its own count by call.
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def working_directory() -> str:
    """The notebook's directory, or the home directory when that one was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.path.expanduser("~")


# From torch 2.15 on "nccl" is another class, which our stop button has not been tried on; this asks for the old one.
_OLD_NCCL = {"TORCH_DIST_USE_NCCL2": "0"}
# What ipykernel, ipyparallel and debugpy add where it is missing, while the group forms: too late, see
# `rank.cell.kernel_api.settle_environment`.
_OF_ENGINES = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYDEVD_USE_FRAME_EVAL": "NO",
}


def import_time(env: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a host server must have been started with."""
    return {k: v for k, v in env.items() if k.startswith(_READ_AT_IMPORT) and k not in THREAD_COUNTS}


def host_server_env(env: Mapping[str, str], token_variable: str, token: str) -> dict[str, str]:
    """The environment of a host server."""
    return {
        **_OLD_NCCL,
        **_OF_ENGINES,
        **env,
        **dict.fromkeys(THREAD_COUNTS, "1"),
        token_variable: token,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() then creates no context
    }


def threads_per_rank(env: Mapping[str, str], cores: int, local_world_size: int) -> int:
    """Threads for each rank: what the user asked for, else an equal share of the cores."""
    return threads_asked(env) or max(1, cores // local_world_size)


def threads_asked(env: Mapping[str, str]) -> int:
    """How many threads for each rank the user asked for; 0: the user did not."""
    asked = env.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and len(asked) < 10 else 0


def rank_env(env: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The notebook's environment with what every rank needs on top; what the user has set wins.

    NCCL's watchdog would end the process on an error or a timeout before the session can tell which rank waited for
    whom, so it only records. Source: https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html
    """
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as nvidia-smi counts, which placed the ranks; CUDA's own is by speed
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        **_OF_ENGINES,
        **_OLD_NCCL,  # a rank that is not forked imports torch itself
    }
    return {**defaults, **env}
