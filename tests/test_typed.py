"""Inputs that users of Jupyter and torch often type: each works, or a sentence names the alternative."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from ddp_notebook.rank.cell.children import Children
from ddp_notebook.rank.cell.commands import _Once, program_of
from tests.conftest import wait_until
from tests.kernels import first_line_of_stderr

_SCRIPT = "import os, sys\nprint('started', *sys.argv[1:])\nprint(int(os.environ['RANK']) + 1)\n"
_IS_NO_RANK = "a process that a cell starts in the shell is not a rank. It does not inherit RANK, WORLD_SIZE and"


@pytest.fixture(scope="module")
def ranks(kernel):
    assert kernel.run("%ddp_start 2 --hang-after 1").status == "ok"
    yield kernel
    kernel.run("%ddp_stop")


@pytest.fixture
def script(tmp_path) -> Path:
    """Write a script that must run as a rank, as under torchrun."""
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT)
    return path


def test_reload_ext_keeps_the_ranks_and_their_variables(ranks):
    ranks.run("%on_all_ranks kept = rank + 40")
    reply = ranks.run("%reload_ext ddp_notebook")
    assert (reply.status, reply.stdout, reply.stderr) == ("ok", "", "")
    assert ranks.run("%on_all_ranks kept").stdout == "[0] 40\n[1] 41\n"
    assert ranks.run("rank").stderr.count("put %%on_all_ranks above") == 1


def test_pdb_on_without_a_user(ranks):
    ranks.run("%pdb on")
    ranks.client.allow_stdin = False
    try:
        reply = ranks.run("%%on_all_ranks\n1 / 0", timeout_s=20)
        assert reply.ename == "RankError" and "no debugger opens, since a program runs this notebook" in reply.stderr
        reply = ranks.run("%ddp_pull", timeout_s=20)
        assert reply.ename == "UsageError" and "the error comes from ddp_notebook" in reply.stderr
    finally:
        ranks.client.allow_stdin = True
        ranks.run("%pdb off")


@pytest.mark.long
def test_debug_after_an_error_of_the_notebooks_own(ranks):
    """It also works after an error in a function of the user: its variables are in the notebook."""
    for code in ("def f(a): return a / 0\nf(1)", "def f(a): ddp_notebook.current().run('1 / 0')\nf(1)"):
        assert ranks.run(f"import ddp_notebook\n{code}").status == "error"
        ranks.client.allow_stdin = True
        message = ranks.start("%debug")
        asked = ranks.client.get_stdin_msg(timeout=20)
        assert "ipdb" in asked["content"]["prompt"]
        ranks.client.input("q")
        assert ranks.finish(message).status == "ok"


# ---- errors that IPython magics show and do not raise


_FAILS_ON_1 = """
import torch
import torch.distributed as dist
found = 7
def check():
    if dist.get_rank() == 1:
        raise ValueError("bad data")
check()
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> Path:
    """Write a script that fails on rank 1 while rank 0 waits for it."""
    path = tmp_path_factory.mktemp("scripts") / "failing.py"
    path.write_text(_FAILS_ON_1)
    path.with_suffix(".ipy").write_text(_FAILS_ON_1)
    return path


@pytest.mark.parametrize(
    "cell",
    [
        "%run {script}",
        pytest.param("%run -i {script}", marks=pytest.mark.long),
        pytest.param("%run -p {script}", marks=pytest.mark.long),
        pytest.param("%run -t -N3 {script}", marks=pytest.mark.long),
        pytest.param("%run {script.parent}/failing.ipy", marks=pytest.mark.long),
        pytest.param("import sys; sys.path.insert(0, '{script.parent}')\n%run -m failing", marks=pytest.mark.long),
        pytest.param("get_ipython().run_line_magic('run', '{script}')", marks=pytest.mark.long),
        pytest.param("%time %run {script}", marks=pytest.mark.long),
        pytest.param("%%time\n%run {script}", marks=pytest.mark.long),
        pytest.param("%%capture kept\n%run {script}", marks=pytest.mark.long),
        pytest.param("%%time\nexec(open('{script}').read())", marks=pytest.mark.long),
        pytest.param("%%timeit -n1 -r1\nexec(open('{script}').read())", marks=pytest.mark.long),
        pytest.param("%%prun\nexec(open('{script}').read())", marks=pytest.mark.long),
        "%%capture kept\nprint('before')\n" + _FAILS_ON_1,
    ],
)
def test_an_error_under_a_magic_ends_the_cell_on_all_ranks(ranks, failing, cell):
    began_s = time.monotonic()
    lines = cell.format(script=failing) + ("" if cell.startswith("%%") else "\nprint('after it')")
    reply = ranks.run(f"%%on_all_ranks\n{lines}", timeout_s=30)
    assert reply.ename == "RankError" and "ValueError: bad data (rank 1)" in reply.evalue, reply.traceback
    assert "after it" not in reply.stdout and time.monotonic() - began_s < 10
    text = reply.traceback
    assert text.count("in check()") == 1 and "execution.py" not in text, text
    assert "ValueError" not in reply.stdout + reply.stderr  # the error is shown once
    if cell.startswith("%%capture kept\nprint"):
        assert ranks.run("%on_all_ranks kept.stdout").stdout == "[0-1] 'before\\n'\n"


def test_a_failed_script_keeps_variables_and_its_error_is_caught(ranks, failing):
    code = f"try:\n    %run {failing}\nexcept ValueError as error:\n    print('caught', error)"
    reply = ranks.run(f"%%on_ranks 1\nfound = 0\n{code}\nprint(found)")
    assert (reply.status, reply.stdout, reply.stderr) == ("ok", "[1] caught bad data\n[1] 7\n", "")


def test_the_exit_status_of_a_script(ranks, tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(int(sys.argv[1]))")
    (tmp_path / "takes.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()")
    reply = ranks.run(f"%%on_all_ranks\n%run {tmp_path}/leaves.py {{rank}}\nprint('goes on')")
    assert reply.ename == "RankError" and reply.stdout == "[0] goes on\n"
    assert "SystemExit: 1: the script exited with this status" in reply.evalue
    reply = ranks.run(f"%%on_all_ranks\n%run -e {tmp_path}/leaves.py {{rank}}\nprint('goes on')")
    assert (reply.status, reply.stdout) == ("ok", "[0-1] goes on\n")
    reply = ranks.run(f"%%on_all_ranks\n%run {tmp_path}/takes.py --epochs 3")
    assert "the script rejected its arguments" in reply.evalue and "a rank has no command line" not in reply.evalue


def test_an_error_in_a_nested_run_cell_does_not_end_the_cell(ranks):
    code = "result = get_ipython().run_cell('1 / 0')\nprint(type(result.error_in_exec).__name__)"
    reply = ranks.run(f"%%on_ranks 0\n%%capture\n{code}")
    assert reply.status == "ok", reply
    reply = ranks.run("%%on_ranks 0\n%%capture\ndef f(:", timeout_s=20)
    assert reply.ename == "RankError" and reply.stderr.count("SyntaxError") + reply.stdout.count("SyntaxError") == 0


def test_a_stop_ends_a_loop_of_nested_cells(ranks):
    code = "print('begun')\nwhile True: get_ipython().run_cell('import time; time.sleep(0.1)')"
    message = ranks.start(f"%%on_all_ranks\n{code}")
    ranks.wait_for_text("begun")
    ranks.interrupt()
    reply = ranks.finish(message, 10)
    assert reply.ename == "KeyboardInterrupt" and "the cell was stopped" in reply.evalue, reply


# ---- scripts in the shell


def test_a_script_in_the_shell_is_no_rank(ranks, script):
    reply = ranks.run(f"%%on_all_ranks\nimport sys\n!{{sys.executable}} {script} --epochs 2", timeout_s=30)
    assert reply.status == "ok" and "KeyError" in reply.stdout and "started --epochs 2" in reply.stdout
    assert _IS_NO_RANK in reply.stderr
    assert f"%run {script} --epochs 2 runs it on the ranks. %ddp_torchrun {script} --epochs 2, in a" in reply.stderr
    assert ranks.run(f"%on_all_ranks %run {script}").stdout == "[0-1] started\n[0] 1\n[1] 2\n"


@pytest.mark.long
def test_the_hint_appears_once_if_scripts_fail_in_succession(ranks, tmp_path):
    (tmp_path / "late.py").write_text("import sys, time\ntime.sleep(float(sys.argv[1]))\nsys.exit(1)\n")
    run = f"!{{sys.executable}} {tmp_path / 'late.py'} {{rank}}"
    for _ in range(2):
        reply = ranks.run(f"%%on_all_ranks\nimport sys\n{run}\n{run}", timeout_s=30)
        assert reply.stderr.count(_IS_NO_RANK) == 1, reply.stderr


@pytest.mark.parametrize(
    "command",
    [
        "out = !{}\nprint(*out)",
        pytest.param("%sx {}", marks=pytest.mark.long),
        pytest.param("%%bash\n{}", id="bash"),
        pytest.param("%%script bash\n{}", id="script", marks=pytest.mark.long),
    ],
)
def test_other_commands_have_no_rank_either(ranks, command):
    shows = "echo -n ${RANK-none} ${MASTER_PORT-none} ${TORCHELASTIC_RUN_ID-none} $OF_CELL"
    assert ranks.run("%%on_all_ranks\nimport os\nos.environ['OF_CELL'] = 'kept'").status == "ok"
    reply = ranks.run(f"%%on_all_ranks\n{command.format(shows)}")
    assert reply.status == "ok" and "none none none kept" in reply.stdout, reply
    assert ranks.run("%on_all_ranks os.environ['RANK']").stdout == "[0] '0'\n[1] '1'\n"


@pytest.mark.long
def test_a_training_script_in_the_shell_fails_at_once(ranks, tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    reply = ranks.run(f"%%on_all_ranks\nimport sys\n!{{sys.executable}} {path}")
    assert reply.status == "ok" and "environment variable RANK expected, but not set" in reply.stdout
    assert _IS_NO_RANK in reply.stderr


@pytest.mark.parametrize(
    "command",
    [
        "out = !{python} -m train_of_test --epochs 2\nprint(*out)",
        pytest.param("!{python} -m train_of_test --epochs 2", marks=pytest.mark.long),
        pytest.param("%%bash\n{python} -m train_of_test --epochs 2", id="bash"),
    ],
)
def test_a_failed_module_in_the_shell_has_a_hint(ranks, command, tmp_path):
    (tmp_path / "train_of_test.py").write_text(_SCRIPT)
    ranks.run(f"%%on_all_ranks\nimport os\nos.environ['PYTHONPATH'] = '{tmp_path}'")
    try:
        reply = ranks.run(f"%%on_all_ranks\n{command.format(python=sys.executable)}")
        assert _IS_NO_RANK in reply.stderr, reply
        assert "%run -m train_of_test -- --epochs 2 runs it on the ranks" in reply.stderr
        assert "%ddp_torchrun -m train_of_test --epochs 2, in a cell of the notebook" in reply.stderr
    finally:
        ranks.run("%on_all_ranks del os.environ['PYTHONPATH']")
    code = f"import sys\nsys.path.insert(0, '{tmp_path}')\n%run -m train_of_test -- --epochs 2"
    ran = ranks.run(f"%%on_all_ranks\n{code}")
    assert ran.stdout == "[0-1] started --epochs 2\n[0] 1\n[1] 2\n", "the command of the hint runs the module"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m train --lr 0.1", "-m train --lr 0.1"),
        ("torchrun --nproc-per-node 2 -m pkg.train", "-m pkg.train"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("python -m torch.distributed.run -m train", "-m train"),
        ("accelerate launch --module train", "-m train"),
        ("python train.py -m fast", "train.py -m fast"),
        ("python -m train data.py", "-m train data.py"),
        ("python -m pip install x", None),
        ("python -m pytest tests/test_model.py", None),
        ("python -m json.tool config.json", None),
        ("python -m", None),
        ("python -c 'pass'", None),
    ],
)
def test_the_program_of_a_command(command, expected):
    assert program_of(command) == (None if expected is None else expected.split())


# ---- waits for child processes


def _wait_for_card(kernel, timeout_s: float = 20.0, has: str = "") -> str:
    """Return the text of the first hang report that contains `has`."""
    until = time.monotonic() + timeout_s
    while True:
        message = kernel.client.get_iopub_msg(timeout=max(0.01, until - time.monotonic()))
        text = message["content"].get("data", {}).get("text/plain", "")
        if message["msg_type"].endswith("display_data") and "The stop button" in text and has in text:
            return text


@pytest.mark.parametrize(
    "wait",
    [
        "!sleep 600",
        pytest.param("import subprocess; subprocess.run(['sleep', '600'])", marks=pytest.mark.long),
        pytest.param("import os; os.system('exec sleep 600')", marks=pytest.mark.long),
        pytest.param(
            "import subprocess; subprocess.run(['sleep', '600'], capture_output=True)", marks=pytest.mark.long
        ),
    ],
)
def test_a_rank_that_waits_for_a_child_has_a_card(ranks, wait):
    message = ranks.start(f"%%on_all_ranks\nif rank == 1:\n    {wait}")
    title, *rows = _wait_for_card(ranks).splitlines()
    assert re.fullmatch(r"waiting for \d s: rank 1 waits for a child process \((exec )?sleep 600\)", title), title
    row = (
        r"  rank 1: at cell line 2.* \(waits for child process (\d+): (exec )?sleep 600; 0\.\d s of CPU time so far\).*"
    )
    found = next(filter(None, (re.fullmatch(row, one) for one in rows)), None)
    assert found is not None, rows
    child = psutil.Process(int(found[1]))
    child.suspend()
    _wait_for_card(ranks, 10.0, f"sleep 600; it is stopped; kill -CONT {child.pid} resumes it)")
    child.resume()
    ranks.interrupt()
    reply = ranks.finish(message)
    assert reply.ename == "KeyboardInterrupt"
    assert "\n  rank 1 was interrupted at cell line 2" in reply.evalue
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


_LOADER = """%%on_all_ranks
import os, signal
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        if i == 1: os.kill(os.getpid(), signal.SIGSTOP)
        return i
if rank == 1:
    for _ in torch.utils.data.DataLoader(Slow(), num_workers=1): pass
dist.barrier(); 'on'
"""


def test_a_stopped_worker_of_a_loader_is_named(ranks):
    message = ranks.start(_LOADER)
    note = r"rank 1: its DataLoader worker \d+ is stopped; kill -CONT \d+ resumes it\n"
    assert re.fullmatch(note, first_line_of_stderr(ranks, 4.0))
    text = _wait_for_card(ranks, 10.0, "is stopped")
    found = re.search(r"its DataLoader worker (\d+) is stopped; kill -CONT (\d+) resumes it", text)
    assert found is not None and found[1] == found[2], text
    psutil.Process(int(found[1])).resume()
    assert ranks.finish(message).stdout == "[0-1] 'on'\n"


@pytest.mark.long
def test_a_rank_that_others_wait_for_is_named_with_its_child(ranks):
    message = ranks.start("%%on_all_ranks\nif rank == 0:\n    !sleep 3\ndist.barrier(); 'on'")
    text = _wait_for_card(ranks)
    assert re.match(
        r"no progress for \d s: not arrived at barrier #\d+: rank 0 is at cell line 2.* \(waits for child process", text
    ), text
    assert ranks.finish(message).stdout == "[0-1] 'on'\n"


_PRINTS = "while true; do echo of_a_child; sleep 0.05; done"
_COMMANDS = {
    "bash": f"%%bash\n{_PRINTS}",
    "a shell of subprocess": f"import subprocess\nsubprocess.run({f'({_PRINTS}); true'!r}, shell=True)",
    "Popen": f"import subprocess\nchild = subprocess.Popen(['sh', '-c', {_PRINTS!r}])\nchild.wait()",
    "an exclamation mark": f"!({_PRINTS}); true",
    "bash by a function": f"get_ipython().run_cell_magic('bash', '', {f'({_PRINTS}); true'!r})",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "bash" else pytest.mark.long) for name in _COMMANDS]
)
def test_a_stop_ends_the_command_with_its_descendants(ranks, name):
    message = ranks.start(f"%%on_all_ranks\n{_COMMANDS[name]}")
    ranks.wait_for_text("of_a_child")
    ranks.interrupt()
    reply = ranks.finish(message, 20)
    assert reply.ename == "KeyboardInterrupt" and "waits for child process" in reply.evalue, reply
    below = psutil.Process(ranks.pid).children(recursive=True)
    wait_until(lambda: not [one for one in below if _is_command(one)], what="the command has ended")


def _is_command(process: psutil.Process) -> bool:
    try:
        return process.name() in ("bash", "sh", "dash", "sleep") and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# ---- packages


@pytest.fixture
def wheel(tmp_path) -> Path:
    """Write a package that can be installed without a network."""
    path = tmp_path / "tiny_of_test-1.0-py3-none-any.whl"
    about = "tiny_of_test-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_of_test.py", "value = 7\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-of-test\nVersion: 1.0\n")
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    return path


def test_packages_are_installed_once_for_all_ranks_of_a_host(ranks, wheel, tmp_path):
    into = tmp_path / "into"
    install = (
        f"install --no-index --no-deps --disable-pip-version-check --root-user-action ignore --target {into} {wheel}"
    )
    reply = ranks.run(
        f"%%on_all_ranks\nimport sys; sys.path.append('{into}')\n%pip {install}\n"
        "import tiny_of_test; tiny_of_test.value",
        timeout_s=60,
    )
    assert reply.status == "ok" and reply.stdout.endswith("[0-1] 7\n"), reply  # the other rank has waited
    assert reply.stdout.count("Successfully installed tiny-of-test-1.0") == 1
    assert re.search(r"ddp_notebook: pip install ran on rank [01] only, for all ranks of its host", reply.stderr)
    assert "restart the kernel" not in reply.stdout


def test_a_captured_pip_install_runs_once_for_all_ranks(ranks, wheel, tmp_path):
    into = tmp_path / "into"
    install = f"install --no-index --no-deps --disable-pip-version-check --target {into} {wheel}"
    reply = ranks.run(
        f"%%on_all_ranks\nout = !{sys.executable} -m pip {install}\n"
        "[sum(words in line for line in out) for words in ('Successfully installed tiny', 'already')]",
        timeout_s=60,
    )
    assert reply.stdout == "[0-1] [1, 0]\n", reply
    assert re.search(r"ddp_notebook: pip install ran on rank [01] only, for all ranks of its host", reply.stderr)


def test_a_stopped_pip_install_is_not_the_result_of_other_ranks(tmp_path, capsys):
    def run_on(rank, result):
        once = _Once(Children(), lambda: (rank, 2), lambda: 1, str(tmp_path), "session")
        return once.run("pip install x", lambda: result, is_captured=True)

    tmp_path.chmod(0o700)
    assert run_on(0, ("", None)) == ("", None)
    assert capsys.readouterr().err == ""
    assert run_on(1, ("done", 0)) == ("done", 0)
    assert "ddp_notebook: pip install ran on rank 1 only" in capsys.readouterr().err
    assert run_on(0, ("again", 0)) == ["done", 0]


def test_the_only_rank_of_a_host_locks_the_environment_for_pip(tmp_path):
    def is_locked():
        folder = os.open(sys.prefix, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(folder)
        return False

    once = _Once(Children(), lambda: (0, 1), lambda: 1, str(tmp_path), "session")
    assert once.run("pip install x", lambda: (is_locked(), 0)) == (True, 0)


def test_installations_in_a_shell_cell_run_one_after_another(ranks, tmp_path):
    """`pip` is a function of the cell, which logs its begin and end."""
    log = tmp_path / "log"
    reply = ranks.run(
        f"%%on_all_ranks\n%%bash\npip() {{ echo begin >> {log}; sleep 0.5; echo end >> {log}; }}\npip install x",
        timeout_s=60,
    )
    assert reply.status == "ok", reply
    assert log.read_text().split() == ["begin", "end"] * 2


@pytest.mark.long
def test_a_failed_installation_has_one_status(ranks, tmp_path):
    for magic in ("!{sys.executable} -m pip install", "%pip install"):
        reply = ranks.run(
            f"%%on_all_ranks\nimport sys\n{magic} --no-index {tmp_path}/nothing.whl\n_exit_code", timeout_s=60
        )
        assert reply.stdout.endswith("[0-1] 1\n") and reply.stdout.count("ERROR") == 1, reply


@pytest.mark.long
def test_a_second_cell_installs_again(ranks, wheel, tmp_path):
    for number in range(2):
        line = f"%pip install --no-index --no-deps --target {tmp_path / 'into'} {wheel}"
        reply = ranks.run(f"%on_all_ranks {line}", timeout_s=60)
        assert reply.stdout.count("Processing ") == 1, (number, reply)


# ---- what belongs to the ranks


def test_a_script_of_ranks_that_runs_in_the_notebook(ranks, script):
    reply = ranks.run(f"%run {script} --epochs 2")
    assert "KeyError" in reply.traceback
    assert reply.stderr == (
        f"RANK is set on ranks only, and %run has run train.py in the notebook: %on_all_ranks %run {script} --epochs 2 "
        f"runs it on the ranks, and %ddp_torchrun {script} --epochs 2 by torchrun\n"
    )
    reply = ranks.run(f"run {script}")  # without `%`: automagic
    assert reply.stderr.startswith("RANK is set on ranks only, and %run has run train.py in the notebook: "), reply
    assert ranks.run("print('fine')").stderr == ""
    reply = ranks.run("import os\nos.environ['WORLD_SIZE']")
    assert reply.stderr == "WORLD_SIZE is set on ranks only: put %%on_all_ranks above the cell\n"


def test_options_of_a_line(ranks):
    assert ranks.run("%on_all_ranks --quiet typed = rank; print(typed)").stdout == ""
    assert ranks.run("%on_all_ranks --ranks 1 typed").stdout == "[1] 1\n"
    assert ranks.run("%on_all_ranks --typed").stdout == "[0] 0\n[1] 1\n", "twice negated"
    assert ranks.run("%on_all_ranks --quite typed").evalue.startswith(
        "--quite is not an option of %on_all_ranks\nusage:"
    )
    assert ranks.run("%on_all_ranks --quiet").evalue.startswith("the options of %on_all_ranks are followed by code")
    assert "put %%on_all_ranks above the cell" in ranks.run("typed").stderr


def test_a_model_that_is_put_into_ddp_twice(ranks):
    ranks.run(
        "%%on_all_ranks\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nnet = torch.nn.Linear(2, 1)"
    )
    assert ranks.run("%on_all_ranks net = DDP(net)").stderr == ""
    again = ranks.run("%on_all_ranks net = DDP(net)")
    assert again.stderr.startswith("[0-1] ddp_notebook: this model is in DDP twice: each step averages its gradients")
    assert "wrong on ranks 0,1: net is in DDP twice" in ranks.run("%ddp_check net").stdout
    assert ranks.run("%on_all_ranks net = net.module").status == "ok"
    assert "twice" not in ranks.run("%ddp_check net").stdout
