"""The accelerators of a host: NVIDIA's GPUs, their selection by CUDA_VISIBLE_DEVICES, and devices listed by torch."""

from __future__ import annotations

import os
import stat
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from ddp_notebook.launch import devices
from ddp_notebook.launch.devices import (
    VISIBLE,
    Accelerators,
    Gpu,
    cores,
    find,
    finish_query,
    parse_query,
    start_query,
    visible,
)

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
    """Install a program that replaces nvidia-smi."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.processes
def test_the_drivers_tool_is_asked(tmp_path, monkeypatch):
    (tmp_path / "answer").write_text(ANSWER)
    put_driver(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/answer')

    assert finish_query(start_query()) == GPUS
    assert (tmp_path / "asked").read_text().split() == [
        "--query-gpu=index,uuid,name,memory.total",
        "--format=csv,noheader,nounits",
    ]


@pytest.mark.processes
def test_a_host_without_a_working_driver_has_no_gpus(tmp_path, monkeypatch):
    put_driver(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert finish_query(start_query()) == []

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert start_query() is None
    assert finish_query(None) == []


@pytest.mark.processes
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
    """Same as CUDA and torch.cuda: `_parse_visible_devices` contains "Repeated id results in empty set"."""
    assert seen("0,0") == []
    assert seen("0,1,0") == []
    assert seen("GPU-77,GPU-77aa") == []


@pytest.mark.processes
def test_a_tool_that_says_something_else_means_no_gpus(tmp_path, monkeypatch):
    put_driver(tmp_path, monkeypatch, "echo 'No devices were found'")

    assert finish_query(start_query()) == []


# ---- accelerators that torch lists. None of these has run on such hardware: the answers are those of torch's
# documentation. Source: https://docs.pytorch.org/docs/stable/accelerator.html,
# https://docs.pytorch.org/docs/stable/xpu.html, https://docs.pytorch.org/docs/stable/notes/hip.html,
# https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.get_default_backend_for_device


def built_for(kind: str | None, count: int, *, hip: str | None = None, lacks: tuple[str, ...] = ()) -> Any:
    """Return the interface of a torch build for a kind of device, on a machine that has some."""
    module = SimpleNamespace(
        get_device_name=lambda index: f"Model {index}",
        get_device_properties=lambda index: SimpleNamespace(total_memory=64 << 30),
    )
    for name in lacks:
        delattr(module, name)
    return SimpleNamespace(
        version=SimpleNamespace(hip=hip, cuda=None),
        accelerator=SimpleNamespace(
            current_accelerator=lambda: None if kind is None else SimpleNamespace(type=kind, index=None),
            is_available=lambda: count > 0,
            device_count=lambda: count,
        ),
        get_device_module=lambda asked: {kind: module}[asked],
    )


def with_backends(*available: str, **of_plug_ins: str) -> Any:
    """Return `torch.distributed` with torch's table of backends, on a build with some of them."""

    def default(kind: str) -> str:
        return of_plug_ins.get(kind) or torch.distributed.get_default_backend_for_device(kind)

    return SimpleNamespace(get_default_backend_for_device=default, is_backend_available=lambda name: name in available)


@pytest.fixture(autouse=True)
def _nothing_is_hidden(monkeypatch):
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)


def test_rocm_has_cuda_devices_and_nccl():
    found = devices.find_accelerators(built_for("cuda", 2, hip="6.4"), with_backends("gloo", "nccl"))
    assert (found.backend, found.trouble) == ("nccl", "")
    assert [(gpu.device, gpu.name, gpu.memory_mib) for gpu in found.gpus] == [
        ("cuda:0", "Model 0", 65536),
        ("cuda:1", "Model 1", 65536),
    ]


def test_intel_has_xpu_devices_and_xccl():
    found = devices.find_accelerators(built_for("xpu", 3), with_backends("gloo", "xccl"))
    assert (found.backend, [gpu.device for gpu in found.gpus]) == ("xccl", ["xpu:0", "xpu:1", "xpu:2"])


def test_a_plug_in_may_lack_names_and_properties():
    torch_of_plug_in = built_for("npu", 1, lacks=("get_device_name", "get_device_properties"))
    found = devices.find_accelerators(torch_of_plug_in, with_backends("hccl", npu="hccl"))
    assert (found.backend, found.gpus[0].name, found.gpus[0].memory_mib) == ("hccl", "npu device", 0)
    torch_of_plug_in.accelerator.get_memory_info = lambda index: (1 << 30, 32 << 30)  # free and total
    found = devices.find_accelerators(torch_of_plug_in, with_backends("hccl", npu="hccl"))
    assert found.gpus[0].memory_mib == 32768


@pytest.mark.parametrize(
    ("interface", "backends", "env", "words"),
    [
        (
            built_for("cuda", 0, hip="6.4"),
            with_backends("nccl"),
            {},
            "torch is built for ROCm 6.4 and finds no such device (is its driver installed?): ranks use the CPU",
        ),
        (
            built_for("xpu", 0),
            with_backends("xccl"),
            {"ZE_AFFINITY_MASK": "9"},
            "torch is built for xpu and finds no such device (ZE_AFFINITY_MASK=9 may hide it): ranks use the CPU",
        ),
        (
            built_for("xpu", 0),
            with_backends("xccl"),
            {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "1"},  # another kind of device
            "torch is built for xpu and finds no such device (is its driver installed?): ranks use the CPU",
        ),
        (
            built_for("cuda", 0, hip="6.4"),
            with_backends("nccl"),
            {"ROCR_VISIBLE_DEVICES": "7", "GPU_DEVICE_ORDINAL": "3"},
            "torch is built for ROCm 6.4 and finds no such device (ROCR_VISIBLE_DEVICES=7 and GPU_DEVICE_ORDINAL=3 may "
            "hide it): ranks use the CPU",
        ),
        (
            built_for("xpu", 1),
            with_backends("gloo"),
            {},
            "torch finds 1 device of type xpu (Model 0), and is built without their backend xccl: ranks use the CPU",
        ),
        (
            built_for("mps", 1),
            with_backends("gloo"),
            {},
            "torch finds 1 device of type mps (Model 0), whose tensors gloo does not send: ranks use the CPU",
        ),
        (
            built_for("maia", 2),
            with_backends("gloo"),
            {},
            "torch finds 2 devices of type maia (Model 0), and has no backend for collectives on them: "
            "ranks use the CPU",
        ),
    ],
    ids=["no driver", "hidden", "another kind", "hidden twice", "no backend", "mps", "unknown"],
)
def test_devices_that_cannot_be_used_are_named(monkeypatch, interface, backends, env, words):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    found = devices.find_accelerators(interface, backends)
    assert (found.gpus, found.trouble) == ((), words)


def test_a_torch_without_accelerators_says_nothing():
    assert devices.find_accelerators(built_for(None, 0), with_backends("gloo")) == Accelerators()


def test_what_the_process_prints_is_read_among_other_lines(monkeypatch, capsys):
    told = devices.find_accelerators(built_for("xpu", 2), with_backends("xccl"))
    monkeypatch.setattr(devices, "find_accelerators", lambda *_: told)
    print("a plug-in says hello", end="")
    devices.print_accelerators()
    print("and good bye")
    assert devices.read_answer(capsys.readouterr().out) == told
    assert Gpu(**told.gpus[1].to_json()) == told.gpus[1]
    assert "it printed nothing" in devices.read_answer("", "").trouble


@pytest.mark.long
def test_a_separate_process_asks_torch_for_accelerators(monkeypatch):
    answer = devices.ask_torch()
    if torch.accelerator.current_accelerator() is None:
        assert answer == Accelerators()
    monkeypatch.setattr(devices, "_ASK", "raise SystemExit('RuntimeError: the driver is too old')")
    words = "torch could not list its accelerators (RuntimeError: the driver is too old): ranks use the CPU"
    assert devices.ask_torch() == Accelerators(trouble=words)
    monkeypatch.setattr(devices, "_ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(devices, "_ASK_S", 0.2)
    assert devices.ask_torch().trouble == "torch did not list its accelerators within 0.2 s: ranks use the CPU"


def test_cuda_variables_do_not_filter_what_torch_has_filtered():
    told = devices.find_accelerators(built_for("cuda", 2, hip="6.4"), with_backends("nccl"))
    assert visible(told.gpus, "1") == list(told.gpus)
