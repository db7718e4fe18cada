"""Hosts in `--hosts`, and the number of ranks on each host."""

from __future__ import annotations

import re
import time

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.launch import start_line
from ddp_notebook.launch.defaults.file import Defaults
from ddp_notebook.launch.options import StartOptions
from ddp_notebook.launch.placement import place_on_hosts
from ddp_notebook.launch.start_line import parse
from ddp_notebook.launch.transports import host_list
from tests.conftest import is_within


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1,gpu2", {"gpu1": None, "gpu2": None}),
        ("me@login, gpu[1-3]:8", {"me@login": None, "gpu1": 8, "gpu2": 8, "gpu3": 8}),
        ("gpu[01,09-11]b:2", {"gpu01b": 2, "gpu09b": 2, "gpu10b": 2, "gpu11b": 2}),
        (["a:1", "b"], {"a": 1, "b": None}),
    ],
)
def test_hosts_are_named_as_clusters_name_them(text, hosts):
    assert host_list.parse(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--hosts must name at least one host; write names of your ~/.ssh/config"),
        ("-oProxyCommand=x", "--hosts must name hosts, got '-oProxyCommand=x';"),
        ("a b", "--hosts must name hosts, got 'a b';"),
        ("a,b,a", "--hosts names a twice; write it once with the sum of its ranks: a:2"),
        ("a:0", "a host must have at least 1 rank, got 'a:0'; leave it out, or write a:1"),
        ("gpu[4-2]", "'4-2' in 'gpu[4-2]' is not a range of numbers"),
        ("gpu[x]", "--hosts must name hosts, got 'gpu[x]';"),
        ("gpu[[1-2]]", "--hosts must name hosts, got 'gpu[[1-2]]';"),
        ("gpu[1-2]node[1-2]", "--hosts must name hosts, got 'gpu[1-2]node[1-2]';"),
        ("gpu[1-3000000]", "must name at most 4,096 hosts, and 'gpu[1-3000000]' exceeds that"),
        ("gpu[1-2000,3001-5097]", "must name at most 4,096 hosts, and "),
        ("login,gpu[1-4096]", "must name at most 4,096 hosts, and 'gpu[1-4096]' exceeds that"),
        ([f"gpu{n}" for n in range(4097)], "must name at most 4,096 hosts, and 'gpu4096' exceeds that"),
        ("gpu[1-" + "9" * 5000 + "]", "is not a range of numbers"),
        ("gpu[" + "0" * 100_000 + "1-2]", "--hosts must name hosts, got "),
        ("gpu[1-2]:3000000", "'gpu[1-2]:3000000' asks for 3000000 ranks; a session has at most 4,096"),
        ("gpu:" + "9" * 5000, "--hosts must name hosts, got "),
        ("gpu," * 200_000, "--hosts names gpu twice"),
    ],
)
def test_hosts_that_cannot_be(text, words):
    began = time.monotonic()
    with pytest.raises(UsageError, match=re.escape(words)) as told:
        host_list.parse(text)
    assert len(str(told.value)) < 1000 and is_within(time.monotonic() - began, 2)


def test_as_many_hosts_as_a_session_may_have():
    assert len(host_list.parse("login,gpu[1-4095]")) == 4096
    with pytest.raises(UsageError, match=r"^a session has at most 4,096 ranks, and --hosts asks for 8,000$"):
        StartOptions(hosts="gpu[1-1000]:8")


def test_host_groups_of_the_sites_file_obey_the_limit_of_hosts():
    racks = {f"rack{n}": f"node{n}x[1-3000]" for n in range(2)}
    with pytest.raises(UsageError, match=r"^--hosts must name at most 4,096 hosts$"):
        start_line.expand_hosts({"rack0": None, "rack1": None}, Defaults(hosts=racks))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--hosts a --gpus 0", "--gpus works only with one machine; with --hosts write --env CUDA_VISIBLE_DEVICES=0,1"),
        ("--python /envs/x/bin/python", "--python works only with other machines"),
    ],
)
def test_options_that_do_not_go_together(line, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(line)


_FACTS = {
    "gpus": [],
    "cores": 8,
    "machine_cores": 8,
    "backends": ["gloo"],
    "torch": "2.13.0",
    "memory_mib": 64 << 10,
    "env": {},
}
_SELVES = {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("--hosts a:1,b:3", "abbb"),
        ("4 --hosts a,b", "aabb"),
        ("5 --hosts a:1,b,c", "abbcc"),
        ("--hosts a,b:1", "aaaab"),  # same number as on one machine without a GPU
    ],
)
def test_n_is_the_sum_of_the_ranks(line, ranks):
    options = parse(line)
    placed = place_on_hosts(options, dict.fromkeys(options.ranks_of_hosts, _FACTS), _SELVES)
    assert "".join(placed.hosts) == ranks
    assert [placed.local_rank(rank) for rank in range(len(ranks))] == [
        ranks[:r].count(ranks[r]) for r in range(len(ranks))
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("3 --hosts a:1,b:1", "3 ranks, but --hosts has 2: 1 on a, 1 on b; N is the sum of all: leave it out"),
        ("5 --hosts a,b", "5 ranks do not divide among a, b as asked; N is the sum of all: write how many each"),
        ("2 --hosts a:2,b", "2 ranks do not divide among a, b as asked"),
        ("1 --hosts a,b", "1 rank does not divide among a, b as asked"),
        ("1 --hosts a:2", "1 rank, but --hosts has 2: 2 on a; N is the sum of all: leave it out"),
    ],
)
def test_another_sum_than_the_hosts_have(line, why):
    with pytest.raises(UsageError, match=why):
        parse(line)  # before any host is contacted
    world_size, _, hosts = line.split()
    options = StartOptions(world_size=int(world_size), hosts=host_list.parse(hosts))
    with pytest.raises(UsageError, match=why):
        place_on_hosts(options, dict.fromkeys(options.ranks_of_hosts, _FACTS), _SELVES)


def test_hosts_that_would_talk_in_two_ways():
    gpu = {"index": 0, "uuid": "GPU-1", "name": "H100", "memory_mib": 80_000}
    facts = {"a": _FACTS, "b": {**_FACTS, "gpus": [gpu], "backends": ["gloo", "nccl"]}}
    with pytest.raises(
        UsageError,
        match=r"all hosts must use the same backend, got gloo on a, nccl on b; choose one, e.g. --backend gloo",
    ):
        place_on_hosts(StartOptions(hosts="a,b"), facts, _SELVES)
