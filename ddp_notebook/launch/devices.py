"""The accelerators of this host, found without a context in this process.

Ranks would inherit a context of the host server, and an inherited context is unusable. So `nvidia-smi` lists NVIDIA
GPUs. If torch is built for other accelerators (AMD, Intel, or a plug-in such as Ascend's), a short-lived process lists
them through torch. This was not run on such hardware: the tests use answers written from torch's documentation.

Source: https://docs.pytorch.org/docs/stable/accelerator.html,
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.get_default_backend_for_device
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_FIELDS = ("index", "uuid", "name", "memory.total")
_ASK = "from ddp_notebook.launch import devices; devices.print_accelerators()"
_ANSWER = "accelerators: "  # prefix of the line with the answer, since plug-ins print lines too
_ASK_S = 60.0  # importing torch and starting a driver on a busy machine
# Variables that hide accelerators from torch. It applies those of its build when it counts devices.
# Source: https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html,
#     https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html#environment-variables,
#     https://www.hiascend.com/document/detail/en/canncommercial/800/apiref/envvar/envref_07_0028.html
_VISIBLE_BY_KIND = {
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES"),
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "xpu": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
VISIBLE = tuple(sorted({name for names in _VISIBLE_BY_KIND.values() for name in names}))
_QUERY = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as listed by its driver or torch."""

    index: int  # the driver's number
    uuid: str  # "GPU-..."
    name: str
    memory_mib: int
    kind: str = "cuda"  # device type in torch; AMD GPUs have "cuda" too
    told_by_torch: bool = False  # torch has already applied the variables that hide devices

    @property
    def device(self) -> str:
        """Its device name in torch, among the devices of its host.

        Example:
            >>> Gpu(index=1, uuid="xpu:1", name="Intel Max 1550", memory_mib=65536, kind="xpu").device
            'xpu:1'
        """
        return f"{self.kind}:{self.index}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def start_query() -> subprocess.Popen[str] | None:
    """Start a query of the driver in the background, for `finish_query`. Returns None without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    return subprocess.Popen(
        [tool, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def finish_query(query: subprocess.Popen[str] | None, timeout_s: float = 20.0) -> list[Gpu]:
    """Return the GPUs that the driver listed; [] if it cannot answer."""
    if query is None:
        return []
    try:
        out, _ = query.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        query.kill()
        query.communicate()
        return []
    return parse_query(out) if query.returncode == 0 else []


def parse_query(text: str) -> list[Gpu]:
    """Read `nvidia-smi --query-gpu=index,uuid,name,memory.total --format=csv,noheader,nounits`.

    Example:
        >>> parse_query("0, GPU-5f2a, NVIDIA H200, 143771")[0].memory_mib
        143771
    """
    gpus = []
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(_FIELDS) or not parts[0].isdigit():
            continue  # a remark of nvidia-smi, such as "No devices were found"
        index, uuid, name, memory = parts
        gpus.append(Gpu(index=int(index), uuid=uuid, name=name, memory_mib=int(memory) if memory.isdigit() else 0))
    return gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """Reply of torch about the accelerators that it is built for."""

    backend: str = ""  # backend for tensors on these devices
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""  # why ranks use the CPU, in a sentence


def ask_torch() -> Accelerators:
    """Query the torch of this environment for its accelerators, in a short-lived process."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            # the same torch as in this process
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return Accelerators(trouble=f"torch did not list its accelerators within {_ASK_S:g} s: ranks use the CPU")
    return read_answer(asked.stdout, asked.stderr)


def read_answer(out: str, errors: str = "") -> Accelerators:
    """Parse the output of `print_accelerators`.

    Example:
        >>> read_answer("", "Traceback ...\\nRuntimeError: no driver").trouble
        'torch could not list its accelerators (RuntimeError: no driver): ranks use the CPU'
    """
    for line in out.splitlines():
        if line.startswith(_ANSWER):
            fields = json.loads(line.removeprefix(_ANSWER))
            gpus = tuple(Gpu(**one) for one in fields.pop("gpus"))
            return Accelerators(gpus=gpus, **fields)
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "it printed nothing")
    return Accelerators(trouble=f"torch could not list its accelerators ({last.strip()[:200]}): ranks use the CPU")


def print_accelerators() -> None:
    """Print the answer of `find_accelerators`. For the process of `ask_torch`."""
    import torch
    import torch.distributed as dist

    answer = find_accelerators(torch, dist)
    print(f"\n{_ANSWER}{json.dumps(asdict(answer))}", flush=True)


def find_accelerators(torch: Any, dist: Any) -> Accelerators:
    """Return the accelerators of this machine, found with the generic interface of torch.

    Args:
        torch: the module `torch`, of 2.11 or later.
        dist: the module `torch.distributed`.
    """
    built = torch.accelerator.current_accelerator()
    if built is None:
        return Accelerators()
    kind = built.type
    name = f"ROCm {torch.version.hip}" if torch.version.hip else kind
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not count:
        names = _VISIBLE_BY_KIND.get("rocm" if torch.version.hip else kind, ())
        hiding = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name) is not None]
        why = f"{' and '.join(hiding)} may hide it" if hiding else "is its driver installed?"
        return Accelerators(trouble=f"torch is built for {name} and finds no such device ({why}): ranks use the CPU")
    module = torch.get_device_module(kind)
    gpus = tuple(_described(torch, module, kind, index) for index in range(count))
    found = f"torch finds {count} {'device' if count == 1 else 'devices'} of type {kind} ({gpus[0].name})"
    try:
        backend = dist.get_default_backend_for_device(kind)
    except ValueError:
        return Accelerators(trouble=f"{found}, and has no backend for collectives on them: ranks use the CPU")
    if backend == "gloo" and kind != "cuda":  # such as "mps", whose tensors gloo cannot send
        return Accelerators(trouble=f"{found}, whose tensors gloo does not send: ranks use the CPU")
    if not dist.is_backend_available(backend):
        return Accelerators(trouble=f"{found}, and is built without their backend {backend}: ranks use the CPU")
    return Accelerators(backend=backend, gpus=gpus)


def _described(torch: Any, module: Any, kind: str, index: int) -> Gpu:
    """Describe a device with the common functions of torch device modules. A plug-in may lack them.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.accelerator.memory.get_memory_info.html
    """
    try:
        name = str(module.get_device_name(index))
    except (AttributeError, RuntimeError, NotImplementedError):
        name = f"{kind} device"
    memory = 0
    for total in (
        lambda: module.get_device_properties(index).total_memory,
        lambda: torch.accelerator.get_memory_info(index)[1],
    ):
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            memory = memory or int(total()) >> 20
    return Gpu(index=index, uuid=f"{kind}:{index}", name=name, memory_mib=memory, kind=kind, told_by_torch=True)


def changed_variables(told: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """Return the variables that hide devices and have changed since torch listed the devices.

    Example:
        >>> changed_variables({"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "0", "ZE_AFFINITY_MASK": "1"})
        ['ZE_AFFINITY_MASK']
    """
    return [name for name in VISIBLE if told.get(name) != env.get(name)]


def visible(gpus: Sequence[Gpu], setting: str | None = None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows, in its order.

    Args:
        gpus: all GPUs of the host.
        setting: the variable's value; None if it is not set. Numbers are positions in the driver's list, and `GPU-`
            names may be shortened. The list ends at the first entry that matches no GPU.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    if setting is None or any(gpu.told_by_torch for gpu in gpus):
        return list(gpus)
    chosen: list[Gpu] = []
    for part in (part.strip() for part in setting.split(",")):
        gpu = find(gpus, part)
        if gpu in chosen:
            return []  # a duplicate: CUDA shows no device either
        if gpu is None:
            break
        chosen.append(gpu)
    return chosen


def find(gpus: Sequence[Gpu], name: str) -> Gpu | None:
    """Return the GPU at position `name`, or the one whose UUID begins with it. MIG slices are not checked."""
    if name.startswith("MIG-"):
        return Gpu(index=-1, uuid=name, name="MIG slice", memory_mib=0)
    if name.isdecimal() and len(name) < 10:
        return gpus[int(name)] if int(name) < len(gpus) else None
    matches = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
    return matches[0] if len(matches) == 1 else None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
