"""The environment that a rank inherits, and the variables that a host server needs at its start."""

from __future__ import annotations

from ddp_notebook.launch.environment import (
    THREAD_COUNTS,
    host_server_env,
    import_time,
    rank_env,
    threads_per_rank,
)

USER = {
    "HOME": "/home/ada",
    "PATH": "/usr/bin",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/x",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "OMP_PROC_BIND": "true",
    "MKL_DYNAMIC": "FALSE",
    "PYTHONPATH": "/src",
    "LD_LIBRARY_PATH": "/lib",
    "TMPDIR": "/scratch",
    "LC_ALL": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_DEBUG": "INFO",
    "WANDB_MODE": "offline",
    "OMP_NUM_THREADS": "3",
}


def test_what_is_read_at_import_is_told_from_the_rest():
    assert set(import_time(USER)) == {
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCHINDUCTOR_CACHE_DIR",
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_PROC_BIND",
        "MKL_DYNAMIC",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "TMPDIR",
        "LC_ALL",
    }


def test_only_variables_read_at_import_time_are_compared():
    assert import_time({**USER, "TORCH_DISTRIBUTED_DEBUG": "OFF"}) != import_time(USER)
    assert import_time({**USER, "NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "1"}) == import_time(USER)
    for name in THREAD_COUNTS:  # a rank sets these by a call
        assert import_time({**USER, name: "7"}) == import_time(USER)


def test_a_host_server_imports_with_one_thread_and_has_its_token():
    env = host_server_env(USER, "TOKEN", "ab12")

    assert {name: env[name] for name in THREAD_COUNTS} == dict.fromkeys(THREAD_COUNTS, "1")
    assert env["TOKEN"] == "ab12"
    assert env["HOME"] == USER["HOME"]
    assert env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert USER["OMP_NUM_THREADS"] == "3", "the notebook's own stays as it is"


def test_cores_are_shared_equally_unless_the_user_says_otherwise():
    assert threads_per_rank({}, cores=16, local_world_size=4) == 4
    assert threads_per_rank({}, cores=16, local_world_size=3) == 5
    assert threads_per_rank({}, cores=2, local_world_size=64) == 1
    assert threads_per_rank({"OMP_NUM_THREADS": "6"}, cores=2, local_world_size=64) == 6
    for nonsense in ("", "0", "-1", "many"):
        assert threads_per_rank({"OMP_NUM_THREADS": nonsense}, cores=8, local_world_size=2) == 4


def test_a_rank_gets_what_it_needs_and_what_the_user_set_wins():
    env = rank_env({"HOME": "/home/ada"}, threads=2)
    assert env == {
        "HOME": "/home/ada",
        "OMP_NUM_THREADS": "2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_DIST_USE_NCCL2": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYDEVD_USE_FRAME_EVAL": "NO",
    }

    env = rank_env({"OMP_NUM_THREADS": "3", "TORCH_NCCL_ENABLE_MONITORING": "1", "MPLBACKEND": "agg"}, threads=2)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["MPLBACKEND"] == "agg"
    assert env["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
