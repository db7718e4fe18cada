"""The device and the backend of each rank, for hosts of every kind."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.placement import Placement, place, place_on_hosts

UUIDS = ["GPU-0aa", "GPU-1bb", "GPU-2cc", "GPU-3dd"]


def host(*, gpus: int = 0, cores: int = 16, backends: tuple[str, ...] = ("gloo", "nccl")) -> dict[str, Any]:
    """Return the facts that a host server of this kind sends."""
    return {
        "cores": cores,
        "memory_mib": 24_000,
        "torch": "2.13.0",
        "backends": backends,
        "gpus": [
            {"index": index, "uuid": UUIDS[index], "name": f"NVIDIA H{index}00", "memory_mib": 143771}
            for index in range(gpus)
        ],
    }


def placed(facts: dict[str, Any], env: dict[str, str] | None = None, **options):
    return place(StartOptions(**options), facts, env or {})


def placed_tasks(*facts: dict[str, Any], env: dict[str, str] | None = None, **options) -> Placement:
    """Return the placement of tasks that all run on one machine."""
    more = {"machine_cores": 16, "env": env or {}}
    tasks = {f"n1:{number}": {**one, **more} for number, one in enumerate(facts)}
    return place_on_hosts(StartOptions(slurm="-N1", **options), tasks, dict.fromkeys(tasks, "n1"))


def refusal(facts: dict[str, Any], env: dict[str, str] | None = None, **options) -> str:
    with pytest.raises(UsageError) as error:
        placed(facts, env, **options)
    return str(error.value)


# ---- without GPUs


@pytest.mark.parametrize(("cores", "world_size", "threads"), [(1, 2, 1), (2, 2, 1), (3, 3, 1), (16, 4, 4)])
def test_without_gpus_two_to_four_ranks_share_the_cores(cores, world_size, threads):
    placement = placed(host(cores=cores))

    assert placement.world_size == world_size
    assert placement.threads == threads
    assert placement.devices == ("cpu",) * world_size
    assert placement.names == ("CPU",) * world_size
    assert placement.hosts == ("this machine",) * world_size
    assert [placement.local_rank(rank) for rank in range(world_size)] == list(range(world_size))
    assert placement.backend == "gloo"
    assert placement.cuda_visible_devices is None


def test_more_ranks_than_cores_have_one_thread_each():
    placement = placed(host(cores=2), world_size=64)

    assert (placement.world_size, placement.threads) == (64, 1)


def test_the_users_number_of_threads_wins():
    assert placed(host(cores=16), {"OMP_NUM_THREADS": "3"}, world_size=2).threads == 3


# ---- with GPUs


def test_without_a_number_every_gpu_gets_a_rank():
    placement = placed(host(gpus=4))

    assert placement.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert placement.names == ("NVIDIA H000", "NVIDIA H100", "NVIDIA H200", "NVIDIA H300")
    assert placement.backend == "nccl"
    assert placement.cuda_visible_devices is None, "all are visible already"


def test_fewer_ranks_take_the_first_gpus_and_see_all():
    placement = placed(host(gpus=4), world_size=2)

    assert placement.devices == ("cuda:0", "cuda:1")
    assert (placement.backend, placement.cuda_visible_devices) == ("nccl", None)


def test_gpus_count_within_what_is_visible():
    env = {"CUDA_VISIBLE_DEVICES": "3,1,2"}
    assert placed(host(gpus=4), env).world_size == 3
    assert placed(host(gpus=4), env).names[0] == "NVIDIA H300"

    placement = placed(host(gpus=4), env, gpus=("2", "0"))

    assert placement.cuda_visible_devices == "GPU-2cc,GPU-3dd"
    assert placement.devices == ("cuda:0", "cuda:1"), "LOCAL_RANK selects among the visible ones"
    assert placement.names == ("NVIDIA H200", "NVIDIA H300")


def test_gpus_are_chosen_by_uuid_too():
    assert placed(host(gpus=4), gpus=("GPU-3dd", "GPU-1")).cuda_visible_devices == "GPU-3dd,GPU-1bb"


def test_a_gpu_that_cannot_be_chosen_is_named():
    facts, env = host(gpus=4), {"CUDA_VISIBLE_DEVICES": "0,1"}

    for name in ("2", "7", "GPU-3dd", "GPU-x", "-1", "H100"):
        assert refusal(facts, env, gpus=("0", name)) == (
            f"--gpus 0,{name}: GPU {name!r} does not exist; choose within CUDA_VISIBLE_DEVICES from 0 to 1, "
            "or a UUID from `nvidia-smi -L`"
        )
    assert refusal(facts, gpus=("1", "0", "1")) == "--gpus 1,0,1 names GPU '1' twice"
    assert refusal(facts, gpus=("1", "GPU-1bb")) == "--gpus 1,GPU-1bb names GPU 'GPU-1bb' twice"


def test_gpus_on_a_host_that_shows_none():
    assert refusal(host(), gpus=("0",)) == "--gpus 0: this host shows no GPU; leave --gpus out"
    assert refusal(host(gpus=1), {"CUDA_VISIBLE_DEVICES": "-1"}, gpus=("0",)) == (
        "--gpus 0: this host shows no GPU (CUDA_VISIBLE_DEVICES=-1 hides 1 GPU); leave --gpus out"
    )
    assert refusal(host(gpus=4), {"CUDA_VISIBLE_DEVICES": ""}, gpus=("0", "1")) == (
        "--gpus 0,1: this host shows no GPU (CUDA_VISIBLE_DEVICES= hides 4 GPUs); leave --gpus out"
    )


def test_hidden_gpus_mean_cpu_ranks():
    placement = placed(host(gpus=4, cores=8), {"CUDA_VISIBLE_DEVICES": ""})

    assert (placement.devices, placement.backend) == (("cpu",) * 4, "gloo")


# ---- more ranks than GPUs


def test_more_ranks_than_gpus_are_refused_with_the_reason():
    assert refusal(host(gpus=2), world_size=4) == (
        "4 ranks on 2 GPUs: NCCL refuses two ranks on one GPU ('Duplicate GPU detected'). "
        "Start at most 2, or add --share-gpus to let ranks share them over gloo, or --gpus none for ranks on the CPU"
    )
    assert "3 ranks on 1 GPU:" in refusal(host(gpus=1), world_size=3)
    assert "2 ranks on 1 GPU:" in refusal(host(gpus=4), world_size=2, gpus=("3",))
    assert "4 ranks on 2 GPUs:" in refusal(host(gpus=2), world_size=4, backend="gloo")


def test_ranks_share_gpus_over_gloo_when_they_may():
    placement = placed(host(gpus=2), world_size=5, share_gpus=True)

    assert placement.backend == "gloo"
    assert placement.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0")
    assert placement.names[4] == "NVIDIA H000"


def test_permission_to_share_changes_nothing_where_nobody_has_to():
    assert placed(host(gpus=2), share_gpus=True).backend == "nccl"
    assert placed(host(), world_size=2, share_gpus=True).devices == ("cpu", "cpu")


# ---- tasks that a launcher has started beside each other


def test_a_task_alone_has_a_rank_for_each_gpu_that_it_sees():
    assert placed_tasks(host(gpus=4)).devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert placed_tasks(host(gpus=4), env={"CUDA_VISIBLE_DEVICES": "2,3"}).names == ("NVIDIA H200", "NVIDIA H300")
    assert placed_tasks(host()).devices == ("cpu",)


def test_tasks_that_see_the_same_gpus_take_one_after_the_other():
    placement = placed_tasks(host(gpus=4), host(gpus=4), host(gpus=4))

    assert (placement.devices, placement.backend) == (("cuda:0", "cuda:1", "cuda:2"), "nccl")
    assert [placement.local_rank(rank) for rank in range(3)] == [0, 1, 2]
    assert placed_tasks(host(gpus=4), host(gpus=4), world_size=4).devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def test_tasks_that_were_given_a_gpu_each_have_it():
    first, second = host(gpus=2), host(gpus=2)
    first["gpus"].pop(1), second["gpus"].pop(0)
    placement = placed_tasks(first, second)

    assert (placement.devices, placement.names) == (("cuda:0", "cuda:0"), ("NVIDIA H000", "NVIDIA H100"))


def test_more_tasks_than_gpus():
    with pytest.raises(UsageError, match=r"n1:1: 2 ranks on 1 GPU: NCCL refuses two ranks on one GPU"):
        placed_tasks(host(gpus=1), host(gpus=1))
    shared = placed_tasks(host(gpus=1), host(gpus=1), share_gpus=True, backend="gloo")
    assert shared.devices == ("cuda:0", "cuda:0")


# ---- backends


def test_a_backend_that_is_asked_for_is_taken():
    assert placed(host(gpus=2), backend="gloo").backend == "gloo"
    assert placed(host(gpus=2), backend="gloo").devices == ("cuda:0", "cuda:1")
    assert placed(host(gpus=2), backend="nccl").backend == "nccl"


def test_auto_without_nccl_is_gloo():
    assert placed(host(gpus=2, backends=("gloo",))).backend == "gloo"


def test_nccl_without_gpus_is_refused():
    message = "nccl needs GPUs, and this host shows none; use --backend gloo"

    assert refusal(host(), backend="nccl") == message
    assert refusal(host(gpus=1), {"CUDA_VISIBLE_DEVICES": "-1"}, backend="nccl") == message


def test_nccl_refuses_more_ranks_than_gpus_without_share_gpus():
    assert refusal(host(gpus=2), backend="nccl", world_size=3) == (
        "3 ranks on 2 GPUs: NCCL refuses two ranks on one GPU ('Duplicate GPU detected'). "
        "Start at most 2, or add --share-gpus, which makes NCCL treat each rank as a separate host: slow, but good "
        "for tests"
    )
    shared = placed(host(gpus=2), backend="nccl", world_size=3, share_gpus=True)
    assert (shared.backend, shared.devices, shared.shares_gpus) == ("nccl", ("cuda:0", "cuda:1", "cuda:0"), True)
    assert not placed(host(gpus=2), backend="nccl", world_size=2, share_gpus=True).shares_gpus


def test_ranks_on_the_cpu_though_there_are_gpus():
    hidden = placed(host(gpus=2), world_size=4, gpus=("none",))
    assert (hidden.backend, hidden.devices, hidden.cuda_visible_devices) == ("gloo", ("cpu",) * 4, "")
    assert placed(host(gpus=2, cores=8), gpus=("none",)).world_size == 4
    assert placed(host(), world_size=2, gpus=("none",)).cuda_visible_devices is None
    assert refusal(host(gpus=2), backend="nccl", gpus=("none",)).startswith("nccl needs GPUs")


def test_a_gpu_for_each_rank_or_none():
    assert placed(host(gpus=2), world_size=2, gpus=("each",)).devices == ("cuda:0", "cuda:1")
    assert placed(host(gpus=2), world_size=2, gpus=("each",)).backend == "nccl"
    assert placed(host(gpus=2), gpus=("each",)).world_size == 2
    assert placed(host(gpus=2), world_size=3, gpus=("each",)).devices == ("cpu",) * 3
    assert placed(host(), world_size=3, gpus=("each",)).devices == ("cpu",) * 3


def test_a_backend_that_torch_was_built_without_is_refused():
    assert refusal(host(), backend="mpi") == (
        "this torch (2.13.0) is built without mpi, which no PyTorch wheel has (only a build from source with "
        "mpicc and USE_MPI=1); it has gloo, nccl: use --backend gloo"
    )
    assert refusal(host(backends=("gloo",)), backend="nccl") == (
        "this torch (2.13.0) is built without nccl; it has gloo: use --backend gloo"
    )


def test_mpi_is_refused_also_where_torch_has_it():
    assert refusal(host(backends=("gloo", "nccl", "mpi")), backend="mpi") == (
        "mpi needs ranks started by mpirun, and these are forked by a host server; use --backend gloo. mpi4py "
        "works if mpirun starts each rank: %ddp_start --mpi '-np 4'"
    )


def test_more_ranks_than_the_memory_holds():
    """A typing error must not exhaust the memory of the machine."""
    assert refusal(host(cores=2), world_size=1000) == (
        "1000 ranks need some 105 GB of memory, and this host has 25 GB; start at most 240"
    )
    assert placed(host(cores=2), world_size=64).world_size == 64


# ---- accelerators that torch lists (not run on such hardware)


def host_of(kind: str, backend: str, count: int, **env: str) -> dict[str, Any]:
    gpus = [
        {
            "index": n,
            "uuid": f"{kind}:{n}",
            "name": f"Model {n}",
            "memory_mib": 65536,
            "kind": kind,
            "told_by_torch": True,
        }
        for n in range(count)
    ]
    return {**host(backends=("gloo", backend)), "gpus": gpus, "device_backend": backend, "env": env}


@pytest.mark.parametrize(("kind", "backend"), [("xpu", "xccl"), ("cuda", "nccl"), ("npu", "hccl")])
def test_there_is_one_rank_for_each_device_that_torch_lists(kind, backend):
    placement = placed(host_of(kind, backend, 3))
    assert placement.devices == (f"{kind}:0", f"{kind}:1", f"{kind}:2")
    assert (placement.backend, placement.names[2], placement.cuda_visible_devices) == (backend, "Model 2", None)
    assert placed(host_of(kind, backend, 3), gpus="none", world_size=2).devices == ("cpu", "cpu")
    assert placed(host_of(kind, backend, 3), gpus="none", world_size=2).cuda_visible_devices is None
    assert placed(host_of(kind, backend, 3), world_size=2).devices == (f"{kind}:0", f"{kind}:1")
    two = placed_tasks(host_of(kind, backend, 2), host_of(kind, backend, 2), world_size=2)
    assert (two.devices, two.backend) == ((f"{kind}:0", f"{kind}:1"), backend)


def test_a_variable_changed_after_the_query_of_torch_is_refused():
    facts = host_of("cuda", "nccl", 2, HIP_VISIBLE_DEVICES="0,1")
    assert placed(facts, {"HIP_VISIBLE_DEVICES": "0,1"}).world_size == 2
    assert refusal(facts, {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}) == (
        "CUDA_VISIBLE_DEVICES has changed since torch listed the devices; set it before the kernel starts, or restart "
        "the kernel"
    )


def test_devices_that_torch_lists_are_not_chosen_or_shared():
    assert refusal(host_of("xpu", "xccl", 2), gpus="1").startswith(
        "--gpus 1 works only with NVIDIA GPUs, and this host has Model 0: set HIP_VISIBLE_DEVICES, ZE_AFFINITY"
    )
    for share_gpus in (False, True):
        assert refusal(host_of("xpu", "xccl", 2), world_size=3, share_gpus=share_gpus) == (
            "3 ranks on 2 devices of type xpu: ranks cannot share them. Start at most 2, or add --gpus none for ranks "
            "on the CPU"
        )
