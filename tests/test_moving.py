"""New hosts of ranks whose host was lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_notebook.launch.devices import Gpu
from ddp_notebook.launch.membership.rank_placement import HostCapacity, move, resized
from ddp_notebook.launch.placement import Placement


def placement(hosts: str, devices: str = "") -> Placement:
    """Return ranks on hosts of one letter each, on GPUs with these numbers."""
    return Placement(
        backend="gloo",
        hosts=tuple(hosts),
        machines=tuple(hosts),
        devices=tuple(f"cuda:{number}" for number in devices) or ("cpu",) * len(hosts),
        names=("H100",) * len(hosts) if devices else ("CPU",) * len(hosts),
        cuda_visible_devices=None,
        threads=1,
    )


def rooms(
    hosts: str, *, gpus: int = 0, cores: int = 8, memory_mib: int = 64_000, machine: str = ""
) -> dict[str, HostCapacity]:
    """Return equal hosts with one-letter names, each on a separate machine, or all on one."""
    found = tuple(Gpu(index=n, uuid=f"GPU-{n}", name=f"H{n}00", memory_mib=80_000) for n in range(gpus))
    return {
        host: HostCapacity(machine=machine or host, cores=cores, machine_cores=8, memory_mib=memory_mib, gpus=found)
        for host in hosts
    }


@pytest.mark.parametrize(
    ("hosts", "lost", "there", "went", "local"),
    [
        ("aabb", "b", rooms("a"), "aaaa", [0, 1, 2, 3]),
        ("aabb", "a", rooms("b"), "bbbb", [2, 3, 0, 1]),  # remaining ranks keep their numbers
        ("aabbcc", "a", rooms("bc"), "bcbbcc", [2, 2, 0, 1, 0, 1]),
        ("aabc", "a", rooms("b", cores=2) | rooms("c"), "ccbc", [1, 2, 0, 0]),  # the host with the most free capacity
        ("ab", "b", rooms("ac"), "ac", [0, 0]),
    ],
)
def test_without_gpus_ranks_go_where_least_is_to_be_done(hosts, lost, there, went, local):
    ranks = [rank for rank, host in enumerate(hosts) if host == lost]
    moved, left = move(placement(hosts), ranks, there)
    assert "".join(moved.hosts) == went and not left
    assert [moved.local_rank(rank) for rank in range(len(hosts))] == local
    assert moved.threads == min(there[host].cores // went.count(host) for host in went), "an equal share of the cores"
    assert moved.group_world_size == len(set(went))
    assert moved.group_rank(0) == 0 and moved.local_world_size(0) == went.count(went[0])


def test_a_rank_goes_to_a_gpu_that_nobody_has():
    moved, left = move(placement("aab", "010"), [2], rooms("a", gpus=4))
    assert moved.hosts == ("a", "a", "a") and moved.devices == ("cuda:0", "cuda:1", "cuda:2") and not left
    assert moved.names[2] == "H200" and moved.local_rank(2) == 2


@pytest.mark.parametrize("there", [rooms("a", gpus=2), rooms("a", gpus=4, memory_mib=250), {}])
def test_without_room_they_stay(there):
    before = placement("aab", "010")
    assert move(before, [2], there) == (before, ["b"])


@pytest.mark.parametrize(
    ("setting", "env", "indices"),
    [(None, {}, [0, 1, 2]), ("2,0", {}, [2, 0]), ("2,0", {"CUDA_VISIBLE_DEVICES": "1"}, [1])],
)
def test_room_is_what_ranks_would_see(setting, env, indices):
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "H100", "memory_mib": 80_000} for n in range(3)]
    its_env = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    facts = {"gpus": gpus, "cores": 8, "machine_cores": 16, "memory_mib": 64_000, "env": its_env}
    room = HostCapacity.of("a", facts, env)
    assert [gpu.index for gpu in room.gpus] == indices
    assert (room.cores, room.machine_cores, room.memory_mib) == (8, 16, 64_000)


@pytest.mark.parametrize(
    ("cores", "asked", "threads"),
    [(8, False, 2), (4, False, 2), (8, True, 1)],  # 4: each host is bound to its own
)
def test_ranks_share_the_cores_of_their_machine(cores, asked, threads):
    before = replace(placement("aaabb"), machines=("m",) * 5, threads_asked=asked)
    now = resized(before, [1, 2, 3, 4], 4, rooms("ab", cores=cores, machine="m"), may_share=False)
    assert "".join(now.hosts) == "aabb" and now.threads == threads


def test_hosts_of_one_machine_count_and_share_together():
    before = replace(placement("abc", "010"), machines=("m", "m", "c"))
    there = rooms("ab", gpus=3, machine="m")
    moved, left = move(before, [2], there)
    assert moved.machines == ("m",) * 3 and moved.devices[2] == "cuda:2" and moved.local_rank(2) == 2 and not left
    assert (moved.group_world_size, moved.local_world_size(0)) == (1, 3)
    assert move(before, [2], rooms("ab", gpus=2, machine="m")) == (before, ["c"])


def test_ranks_of_one_host_move_together_or_not_at_all():
    before = placement("abbc", "0010")
    moved, left = move(before, [1, 2, 3], rooms("a", gpus=2))
    assert left == ["b"] and moved.hosts == ("a", "b", "b", "a") and moved.devices[3] == "cuda:1"


def test_gpus_that_ranks_share_are_shared_again():
    moved, left = move(placement("aabb", "0000"), [2, 3], rooms("a", gpus=1))
    assert moved.hosts == ("a",) * 4 and moved.devices == ("cuda:0",) * 4 and not left
    assert [moved.local_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
