"""Ranks in tasks that an ipyparallel profile starts, with any launcher."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from ipyparallel.cluster.launcher import BatchSystemLauncher

import ddp_notebook
from ddp_notebook.errors import CellTimeoutError, RankDiedError, StartError, UsageError
from ddp_notebook.launch.starters import profile as profile_module
from ddp_notebook.launch.starters.profile import ProfileStarter
from tests.conftest import wait_until
from tests.ssh import sshd
from tests.starters.conftest import files_in, invitations, need_mpi, said, sum_of

_CLASS = "c.Cluster.engine_launcher_class = {!r}"


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Set the working directory of the notebook, where ipyparallel would write scripts."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_processes_of_this_machine(make_profile, in_folder, cache):
    folder = make_profile("on_this_machine", "c.Cluster.n = 2")
    with ddp_notebook.start(profile="on_this_machine", grace_s=0.3) as session:
        assert sum_of(session) == ["2"] * 2
        place = "print(*(os.environ[n] for n in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK')), os.getcwd())"
        assert said(session, "import os; " + place) == [f"0 2 0 {in_folder}", f"1 2 0 {in_folder}"]
        with pytest.raises(CellTimeoutError):
            session.run("dist.recv(torch.ones(1), 1 - rank)", timeout_s=0.3)
        with pytest.raises(RankDiedError):
            session.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
        session.ranks.heal()
        assert sum_of(session) == ["2"] * 2
    assert files_in(folder) == {"ipcluster_config.py"} and not list(in_folder.iterdir()) and not invitations(cache)


# ---- batch systems: a submit command that runs the script, as often as its job array says

_SUBMIT = """#!/bin/sh
case "$0" in *bsub) script="{folder}/script"; cat > "$script" ;; *) script="$1"; cp "$1" "{folder}/script" ;; esac
count=$(sed -n 's/.*[[ ]1-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq "$count"); do sh "{folder}/script" >> "{folder}/output" 2>&1 < /dev/null & done
echo "Job <4711> was submitted"
"""
_DELETE = '#!/bin/sh\necho "$0 $*" >> "{folder}/deleted"\n'


@pytest.fixture
def batch_system(tmp_path, monkeypatch):
    folder = tmp_path / "batch"
    folder.mkdir()
    for name, text in (("qsub", _SUBMIT), ("bsub", _SUBMIT), ("qdel", _DELETE), ("bkill", _DELETE)):
        (folder / name).write_text(text.format(folder=folder))
        (folder / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "delete"),
    [
        ("pbs", "qdel"),
        pytest.param("sge", "qdel", marks=pytest.mark.long),
        pytest.param("lsf", "bkill", marks=pytest.mark.long),
    ],
)
def test_a_batch_system(launcher, delete, make_profile, batch_system, in_folder, cache):
    folder = make_profile(f"on_{launcher}", _CLASS.format(launcher))
    told: list[str] = []
    with ddp_notebook.start(2, profile=f"on_{launcher}", report=told.append) as session:
        assert sum_of(session) == ["2"] * 2
        assert "ddp_notebook.launch.transports.outpost" in (batch_system / "script").read_text()
        assert not list(in_folder.glob(f"{launcher}*"))
    assert any(re.search("job 4711 .*; its output is in", line) for line in told)
    assert (batch_system / "deleted").read_text() == f"{batch_system / delete} 4711\n"
    assert files_in(folder) == {"ipcluster_config.py"} and not invitations(cache)


@pytest.mark.processes
def test_time_in_a_queue_is_none_of_the_start(make_profile, batch_system, in_folder):
    make_profile("queued", _CLASS.format("pbs"))
    (batch_system / "qsub").write_text("#!/bin/sh\necho 4712\n")
    profile = ProfileStarter("queued", 2, None)
    try:
        assert not profile.is_queued
        profile.start(["python", "-m", "no.module"], {})
        wait_until(lambda: profile.is_queued)
        assert "job 4712 is queued or starting; its output is in" in profile.state()
        Path(profile._launcher.output_file).touch()
        assert not profile.is_queued and "job 4712 runs; its output" in profile.state()
    finally:
        profile.end()


@pytest.mark.long
def test_a_launcher_that_does_not_end_is_given_up(make_profile, batch_system, in_folder, monkeypatch, caplog):
    make_profile("stays", _CLASS.format("pbs"))
    (batch_system / "qsub").write_text("#!/bin/sh\necho 4713\n")
    (batch_system / "qdel").write_text("#!/bin/sh\nexec sleep 5\n")  # simulates a server that does not answer
    monkeypatch.setattr(profile_module, "_END_S", 0.1)
    monkeypatch.setattr(profile_module, "_GONE_S", 0.3)
    profile = ProfileStarter("stays", 2, None)
    profile.start(["python", "-m", "no.module"], {})
    wait_until(lambda: profile.is_queued)
    began = time.monotonic()
    profile.end()
    assert time.monotonic() - began < 4 and "job 4713; check that they have ended" in caplog.text
    assert profile._thread is not None
    profile._thread.join()


@pytest.mark.long
@need_mpi
def test_a_template_that_starts_fewer_tasks_than_there_are_ranks(make_profile, batch_system, in_folder):
    make_profile(
        "with_template",
        _CLASS.format("pbs"),
        "c.PBSEngineSetLauncher.batch_template = '''#PBS -t 1-1",
        "mpirun --allow-run-as-root --oversubscribe -np 2 {program_and_args}'''",
    )
    with ddp_notebook.start(4, profile="with_template") as session:
        assert said(session, "import os; print(os.environ['OMPI_COMM_WORLD_RANK'])") == ["0", "0", "1", "1"]


# ---- other launchers


@pytest.mark.long
@need_mpi
def test_mpi(make_profile, in_folder):
    folder = make_profile(
        "by_mpi", _CLASS.format("mpi"), "c.MPILauncher.mpi_args = ['--allow-run-as-root', '--oversubscribe']"
    )
    with ddp_notebook.start(2, profile="by_mpi") as session:
        assert sum_of(session) == ["2"] * 2
    assert files_in(folder) == {"ipcluster_config.py"}


@pytest.mark.long
def test_ssh(make_profile, in_folder, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys")
    with sshd.running(keys) as command:
        folder = make_profile(
            "by_ssh",
            _CLASS.format("ssh"),
            "c.SSHEngineSetLauncher.engines = {'one': 1, 'two': {'n': 1}}",
            f"c.SSHLauncher.ssh_cmd = {command.split()}",
            f"c.SSHLauncher.scp_cmd = {command.replace('ssh', 'scp', 1).split()}",
            f"c.SSHLauncher.remote_python = {sshd.python(keys)!r}",
        )
        with pytest.raises(UsageError, match=r"has slots for 2 engines \(one: 1, two: 1\), not for 3; start fewer"):
            ddp_notebook.start(3, profile="by_ssh")
        with ddp_notebook.start(profile="by_ssh") as session:
            assert sum_of(session) == ["2"] * 2
    assert not [file for file in files_in(folder) if "security" in file]


# ---- what cannot be


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [_CLASS.format("htcondor")],
            r"HTCondorEngineSetLauncher, which can start only ipyparallel's own engines: .* --client profile=bad",
        ),
        (
            [_CLASS.format("winhpc")],
            r"WindowsHPCEngineSetLauncher, which can start only ipyparallel's own engines: .* --client profile=bad",
        ),
        ([_CLASS.format("nonsense")], r"ipcluster_config.py: TraitError: .*'nonsense' could not be imported"),
        (["c.Cluster.n = = 2"], r"ipcluster_config.py, line 2: SyntaxError: invalid syntax"),
        (["", "c.Cluster.n = some"], r"ipcluster_config.py, line 3: NameError: name 'some' is not defined"),
        ([_CLASS.format("pbs")], r"No such file or directory: 'qsub'"),
        (
            [_CLASS.format("pbs"), "c.PBSEngineSetLauncher.batch_template = '#PBS -t 1-{n}\\n#PBS -l {wall}\\n'"],
            r"batch_template of PBSEngineSetLauncher, line 2: '#PBS -l {wall}': NameError: name 'wall' is not defined",
        ),
        (
            [_CLASS.format("pbs"), "c.PBSEngineSetLauncher.batch_template_file = '/no/such'"],
            r"the batch template cannot be read: .*'/no/such'",
        ),
        (
            ["c.EngineLauncher.engine_cmd = ['ipengine']"],
            r"engine_cmd of LocalEngineSetLauncher must contain -m, got \['ipengine'\]; set",
        ),
    ],
)
def test_a_profile_that_will_not_do(lines, words, make_profile, in_folder, cache):
    folder = make_profile("bad", *lines)
    try:
        with pytest.raises((StartError, UsageError), match=words):
            ddp_notebook.start(2, profile="bad")
        assert files_in(folder) == {"ipcluster_config.py"} and not list(in_folder.iterdir()) and not invitations(cache)
    finally:
        shutil.rmtree(folder)


@pytest.mark.processes
def test_a_template_that_starts_engines_by_name(make_profile, tmp_path):
    file = tmp_path / "template"
    file.write_text("#!/bin/sh\n# for ipengine\nmpiexec -n {n} ipengine --profile-dir={profile_dir}\n")
    make_profile("by_name", _CLASS.format("pbs"), f"c.PBSEngineSetLauncher.batch_template_file = {str(file)!r}")
    with pytest.raises(
        StartError, match=r"template, line 3: 'mpiexec .*' starts engines by name; use {program_and_args}"
    ):
        ddp_notebook.start(2, profile="by_name")


@pytest.mark.processes
def test_a_batch_system_that_refuses(make_profile, batch_system):
    (batch_system / "qsub").write_text("#!/bin/sh\necho 'qsub: no such queue: fast' >&2\nexit 170\n")
    make_profile("refused", _CLASS.format("pbs"))
    words = ": qsub: no such queue: fast" if hasattr(BatchSystemLauncher, "_run_command") else ""  # ipyparallel 9
    with pytest.raises(StartError, match=f"qsub .*ended with status 170{words}"):
        ddp_notebook.start(2, profile="refused")


@pytest.mark.processes
def test_a_python_without_torch(make_profile, tmp_path):
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError(\"No module named 'psutil'\")")
    python = sshd.python(tmp_path, variable=f'PYTHONPATH="{tmp_path}:$PYTHONPATH"')
    make_profile("without_torch")
    with pytest.raises(StartError, match="No module named 'psutil'; install it on that host too"):
        ddp_notebook.start(2, profile=ddp_notebook.Profile("without_torch", python=python))


@pytest.mark.processes
def test_a_profile_that_is_not_there_and_one_that_does_not_count(make_profile):
    make_profile("is_there")
    with pytest.raises(UsageError, match=r"profile 'is_not' does not exist in .*; it has .*is_there"):
        ddp_notebook.start(2, profile="is_not")
    with pytest.raises(
        UsageError, match=r"does not set a number of engines; pass N, e\.g\. %ddp_start 8 --profile is_there"
    ):
        ddp_notebook.start(profile="is_there")


@pytest.mark.processes
def test_the_command_keeps_words_before_the_interpreter(make_profile):
    make_profile("in_a_container", "c.EngineLauncher.engine_cmd = ['nice', 'python3', '-m', 'ipyparallel.engine']")
    profile = ProfileStarter("in_a_container", 1, None)
    try:
        assert profile._python == ["nice", "python3"]
    finally:
        profile.end()


@pytest.mark.processes
def test_what_would_be_sent_is_shown(make_profile, in_folder):
    make_profile("shown", _CLASS.format("pbs"))
    make_profile("shown_too")
    for name, words in (("shown", "#PBS -t 1-3"), ("shown_too", "3 times ")):
        profile = ProfileStarter(name, 3, "/envs/x/bin/python")
        try:
            shown = profile.preview()
        finally:
            profile.end()
        assert words in shown and "/envs/x/bin/python -m ddp_notebook.launch.transports.outpost" in shown
    assert not list(in_folder.iterdir())


@pytest.mark.processes
def test_a_check_leaves_nothing(make_profile, tmp_path, monkeypatch):
    make_profile("checked", _CLASS.format("pbs"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "#PBS -t 1-3" in repr(ddp_notebook.check(3, profile="checked"))
    assert not list(tmp_path.iterdir())
