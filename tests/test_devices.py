"""The GPUs of a host, and which of them CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import os
import stat
import time

from ddp_notebook.launch.devices import Gpu, cores, find, finish_query, parse_query, start_query, visible

ANSWER = """\
0, GPU-5f2a1111-0000, NVIDIA H200, 143771
1, GPU-5f2a2222-0000, NVIDIA H200, 143771
2, GPU-77aa3333-0000, NVIDIA A100-SXM4-80GB, [N/A]
"""
GPUS = parse_query(ANSWER)


def seen(setting: str | None) -> list[int]:
    return [gpu.index for gpu in visible(GPUS, setting)]


def test_the_drivers_answer_is_read():
    assert GPUS[0] == Gpu(index=0, uuid="GPU-5f2a1111-0000", name="NVIDIA H200", memory_mib=143771)
    assert [gpu.index for gpu in GPUS] == [0, 1, 2]
    assert GPUS[2].memory_mib == 0, "the driver did not say"
    assert Gpu(**GPUS[0].to_json()) == GPUS[0]
    assert parse_query("") == []


def test_without_the_variable_all_are_visible():
    assert seen(None) == [0, 1, 2]


def test_numbers_choose_and_order():
    assert seen("2,0") == [2, 0]
    assert seen(" 1 , 2 ") == [1, 2]


def test_uuids_choose_and_may_be_cut_short():
    assert seen("GPU-77aa3333-0000,GPU-5f2a1") == [2, 0]
    assert seen("GPU-77") == [2]
    assert seen("GPU-5f2a") == [], "two begin like this"
    assert seen("5f2a1") == []


def test_an_entry_that_names_no_gpu_ends_the_list():
    assert seen("") == []
    assert seen("-1") == []
    assert seen("1,-1,0") == [1]
    assert seen("0,7,1") == [0]
    assert seen("none") == []


def test_find_takes_a_position_or_a_uuid():
    assert find(GPUS, "1") is GPUS[1]
    assert find(GPUS, "GPU-77") is GPUS[2]
    assert find(GPUS, "3") is None
    assert find(GPUS, "GPU-") is None
    assert find(GPUS[2:], "0") is GPUS[2], "positions count within what is given"


def put_driver(folder, monkeypatch, script: str) -> None:
    """A tool in the place of nvidia-smi."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_drivers_tool_is_asked(tmp_path, monkeypatch):
    (tmp_path / "answer").write_text(ANSWER)
    put_driver(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/answer')

    assert finish_query(start_query()) == GPUS
    assert (tmp_path / "asked").read_text().split() == [
        "--query-gpu=index,uuid,name,memory.total",
        "--format=csv,noheader,nounits",
    ]


def test_a_host_without_a_working_driver_has_no_gpus(tmp_path, monkeypatch):
    put_driver(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert finish_query(start_query()) == []

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert start_query() is None
    assert finish_query(None) == []


def test_a_driver_that_hangs_is_given_up(tmp_path, monkeypatch):
    put_driver(tmp_path, monkeypatch, "exec sleep 60")
    query = start_query()
    assert query is not None
    began = time.monotonic()

    assert finish_query(query, timeout_s=0.1) == []
    assert time.monotonic() - began < 5
    assert query.returncode is not None, "and it is ended"


def test_cores_are_those_that_this_process_may_use():
    allowed = os.sched_getaffinity(0)
    assert cores() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_gpu_that_is_named_twice_leaves_none():
    """As CUDA and torch.cuda count: `_parse_visible_devices` says "Repeated id results in empty set"."""
    assert seen("0,0") == []
    assert seen("0,1,0") == []
    assert seen("GPU-77,GPU-77aa") == []


def test_a_tool_that_says_something_else_means_no_gpus(tmp_path, monkeypatch):
    put_driver(tmp_path, monkeypatch, "echo 'No devices were found'")

    assert finish_query(start_query()) == []
