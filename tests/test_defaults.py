"""Defaults of a site: their effect on a start, and messages about invalid lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.defaults import file
from ddp_notebook.launch.options import Slurm, Ssh, StartOptions
from ddp_notebook.launch.start_line import parse, read, with_defaults

_FILE = """\
# of the physics cluster
[start]
backend = "gloo"
timeout_s = 300
hang_after_s = "off"
guard = false
python = "/envs/train/bin/python"
env = { NCCL_DEBUG = "WARN", N = 2 }

[hosts]
lab = ["gpu1:8", "gpu2"]
rack = "node[01-02]:4"

[slurm]
account = "physics"
gpus-per-node = 8
exclusive = true
requeue = false

[ssh]
command = "ssh -F /etc/cluster"
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes the defaults file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "site.toml"
        path.write_text(text)
        monkeypatch.setenv(file.VARIABLE, str(path))
        return path

    return write


def test_nothing_is_written_down(monkeypatch, tmp_path):
    monkeypatch.delenv(file.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert file.path() == tmp_path / "ddp_notebook.toml"
    assert read("2").options == StartOptions(world_size=2) and read("2").note == ""
    file.path().write_text("[start]\ntimeout_s = 7\n")
    assert read("2").options.timeout_s == 7 and read("2").note == f"defaults of {file.path()}: --timeout 7"


def test_defaults_hold_where_the_line_says_nothing(write):
    path = write(_FILE)
    asked = read("2 --env B=1 --hosts login:2")
    assert asked.options == StartOptions(
        world_size=2,
        backend="gloo",
        timeout_s=300.0,
        hang_after_s=None,
        guard=False,
        env={"NCCL_DEBUG": "WARN", "N": "2", "B": "1"},
        hosts=Ssh({"login": 2}, python="/envs/train/bin/python"),
    )
    assert (
        asked.note.startswith(f"defaults of {path}: --backend gloo, --env ") and "by ssh -F /etc/cluster" in asked.note
    )
    line = "2 --backend auto --timeout 9 --hang-after 3 --guard on --python p --env N=5 --hosts login:2"
    assert read(line).options == parse(line.replace("N=5", "NCCL_DEBUG=WARN N=5"))
    assert parse(line).env == {"N": "5"}, "a line alone is what it says"


def test_the_sites_python_is_for_other_machines(write):
    write('[start]\npython = "/envs/train/bin/python"\n')
    assert read("2").options == StartOptions(world_size=2) and read("2").note == ""
    with pytest.raises(UsageError, match="--python works only with other machines"):
        read("2 --python other")


@pytest.mark.parametrize(
    ("hosts", "those"),
    [
        ("lab", {"gpu1": 8, "gpu2": None}),
        ("lab:2", {"gpu1": 2, "gpu2": 2}),
        ("login,rack", {"login": None, "node01": 4, "node02": 4}),
        ("gpu1,other", {"gpu1": None, "other": None}),
    ],
)
def test_a_name_stands_for_hosts(write, hosts, those):
    write(_FILE)
    assert read(f"--hosts {hosts}").options.hosts == Ssh(those, python="/envs/train/bin/python")
    assert list(read(f"--hosts {hosts}").options.ranks_of_hosts) == list(those)
    assert with_defaults(StartOptions(hosts=hosts)).hosts == Ssh(those)


def test_a_host_that_comes_twice(write):
    write(_FILE)
    for hosts in ("gpu2,lab", "lab,gpu2"):
        with pytest.raises(UsageError, match=f"--hosts {hosts} has gpu2 twice; lab includes it already"):
            read(f"--hosts {hosts}")


def test_arguments_of_slurm_come_before_those_of_the_line(write):
    write(_FILE)
    python = "/envs/train/bin/python"
    assert read("--slurm '-N2 -A other'").options.slurm == Slurm(
        "--account=physics --gpus-per-node=8 --exclusive -N2 -A other", python=python
    )
    assert read("--slurm").options.slurm == Slurm("", python=python), "the allocation's nodes, and no queue"
    assert read("2").options.slurm is None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[start]\nbackend = gloo\n", 2, "'backend = gloo' is not valid TOML: Invalid value; put text in quotes"),
        ("[start]\nbackend = 'a\n", 2, '"backend = \'a" is not valid TOML'),
        ("[start\n", 1, "'[start' is not valid TOML"),
        ("[start]\n\nbackends = 'gloo'\n", 3, "[start] has no 'backends'; it may have backend, env, timeout_s"),
        ("[start]\nbackend = 'ucc'\n", 2, "unknown backend 'ucc'; choose one of auto, nccl, gloo, mpi"),
        ("[start]\nlive = 'auto'\ntimeout_s = '5'\n", 3, "timeout_s is '5'; write it as timeout_s = 300"),
        (
            "[start]\ntimeout_s = 0\n",
            2,
            "--timeout must be a positive number of seconds, at most a week, e.g. --timeout 60, got 0",
        ),
        ("[start]\ngrace_s = 'on'\n", 2, "grace_s is 'on'; write it as grace_s = 3, or \"off\""),
        ("[start]\nguard = 'on'\n", 2, "guard is 'on'; write it as guard = true"),
        ("[start]\nheal = 1\n", 2, "heal is 1; write it as heal = true"),
        ("[start]\ntimeout_s = true\n", 2, "timeout_s is True; write it as timeout_s = 300"),
        ("[start]\n[start.env]\nA = [1]\n", 2, "env sets A to [1]; write it as env = { NCCL_DEBUG"),
        ("[start]\nenv = { RANK = '1' }\n", 2, "env sets RANK, which every rank gets from the session"),
        ("start.backend = 3\n", 1, 'backend is 3; write it as backend = "gloo"'),
        ("\n\nstart = { backend = 3 }\n", 3, 'backend is 3; write it as backend = "gloo"'),
        (
            "[slurms]\na = 1\n",
            1,
            "unknown section 'slurms'; the sections are [start], [hosts], [slurm]",
        ),
        ("# x\nhosts = 'a,b'\n", 2, "'hosts' is a section: write [hosts] on a line of its own"),
        ("[hosts]\nlab = 3\n", 2, 'lab must name hosts; write it as lab = ["gpu1:8", "gpu2:8"]'),
        ("[hosts]\nok = 'a'\nlab = 'a,a'\n", 3, "lab names a twice; write it once with the sum of its ranks: a:2"),
        ("[hosts]\nlab = []\n", 2, "lab must name at least one host; write names of your"),
        ("[hosts]\n'my lab' = '-x'\n", 2, "must name hosts, got '-x'"),
        ("[slurm]\naccount = ['a']\n", 2, 'account is not an argument of sbatch; write it as account = "physics"'),
        ("[ssh]\ncommand = ['ssh']\n", 2, "command is ['ssh']; write it as command = \"ssh -F FILE\""),
        ("[ssh]\nport = 22\n", 2, "[ssh] has no 'port'; it may have command"),
    ],
)
def test_a_line_that_is_wrong_is_named(write, text, line, words):
    path = write(text)
    with pytest.raises(UsageError, match=re.escape(f"{path}, line {line}: ") + ".*" + re.escape(words)):
        read("2")


def test_a_file_that_cannot_be_read(write, monkeypatch, tmp_path):
    path = write("")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=re.escape(f"{path} cannot be read")):
        read("2")
    monkeypatch.setenv(file.VARIABLE, str(tmp_path / "missing.toml"))
    with pytest.raises(
        UsageError, match=r"DDP_NOTEBOOK_CONFIG must be an existing file, got .*missing.toml; correct it or unset it"
    ):
        read("2")


def test_a_check_starts_nothing():
    assert read("2 --check").checks and not read("2").checks
    assert read("2 --check").options == parse("2")
