"""Resources of a rank and of the notebook's machine are used up for real.

One sentence contains the rank, the resource, the amount in use and the limit. Nothing blocks, nothing is lost, and
everything works again when the resource is available.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from ddp_notebook.errors import (
    CannotWriteError,
    CellTimeoutError,
    ClientError,
    DDPNotebookError,
    RankDiedError,
    RankError,
)
from ddp_notebook.run.files.landing import Landing
from ddp_notebook.widgets.simulated.simulation import simulate
from tests.conftest import wait_until

_ROOT = Path(__file__).parents[1]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems and changes users")
_NOT_ENTERED = "if rank == 0: dist.all_reduce(torch.ones(1))"
USE_UP_DESCRIPTORS = """
import os, resource
if rank == 1:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    files = []
    try:
        while True: files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError: pass
"""
USE_UP_THREADS = """
import os, resource, threading
if rank == 1:
    os.setresuid(54321, 54321, 0)  # root has no limit
    count = sum(1 for _ in os.listdir("/proc/self/task"))
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (count + 5, before[1]))
    go, threads = threading.Event(), []
    try:
        while len(threads) < 50:
            thread = threading.Thread(target=go.wait)
            thread.start()
            threads.append(thread)
    except RuntimeError: pass
    print(len(threads))
"""


USE_UP_MEMORY = """
import os, resource, threading, time
def lower_limit(mib):
    its = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    used = int(its["VmSize" if KIND == resource.RLIMIT_AS else "VmData"].split()[0]) << 10
    resource.setrlimit(KIND, (used + (mib << 20), before[1]))
def use_up(bag, least):
    size = 32 << 20
    while size >= least:
        try: bag.append(bytearray(size))
        except MemoryError: size //= 2
KIND = resource.RLIMIT_%s
before = resource.getrlimit(KIND)
if rank == 1: lower_limit(200)
"""


def took_s(call, *args, **options) -> float:
    began = time.monotonic()
    call(*args, **options)
    return time.monotonic() - began


def check_it_goes_on(session, sentence: str, free: str) -> None:
    """Check that everything else works without waiting while a resource of rank 1 is used up, and everything
    afterwards."""
    assert re.search(sentence, repr(session.status())), session.status()
    with pytest.raises(RankError, match="ZeroDivisionError: division by zero") as failed:
        session.run("1/0")
    assert "psutil" not in str(failed.value)
    for _ in range(2):
        with pytest.raises(CellTimeoutError):
            session.run(_NOT_ENTERED, timeout_s=0.5)
        assert took_s(session.run, "print(rank)") < 2.0
    assert session.run("dist.all_reduce(torch.ones(1)); print('reduced')")[1].stdout == "reduced\n"
    assert session.ranks.heal() == ["no rank has died"]
    session.run(free)
    assert not re.search(sentence, repr(session.status()))
    assert session.run("t = torch.ones(1); dist.all_reduce(t); print(kept, t.item())")[1].stdout == "kept 2.0\n"


@pytest.mark.long
def test_file_descriptors_of_a_rank(make_session, capfd):
    session = make_session(2)
    session.run(f"kept = 'kept'{USE_UP_DESCRIPTORS}")
    with pytest.raises(RankError, match=r"Too many open files.*\(rank 1 has no file descriptor left: 300 of 300\)"):
        session.run("open('/etc/hostname').close()")

    free = (
        "if rank == 1:\n    for file in files: os.close(file)\n    resource.setrlimit(resource.RLIMIT_NOFILE, before)"
    )
    check_it_goes_on(session, r"\nrank 1 has no file descriptor left: 300 of 300(\n|$)", free)
    assert "psutil" not in capfd.readouterr().err


def test_a_limit_of_descriptors_below_those_that_are_open(make_session, capfd):
    """The reserve does not help: a descriptor must be less than the limit."""
    session = make_session(2)
    session.run(
        "import resource\nkept, before = 'kept', resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "if rank == 1: resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))"
    )
    status = session.status()
    assert [row.state for row in status.rows] == ["idle", "idle"]
    assert status.rows[1].rss_bytes is None and " ? " in repr(status)
    assert status.rows[1].shortages == ("rank 1 has no file descriptor left: 3 of 3",)
    with pytest.raises(RankError, match=r"Too many open files.*\(rank 1 has no file descriptor left: 3 of 3\)"):
        session.run("open('/etc/hostname').close()")
    with pytest.raises(ClientError, match=r"needs all ranks, and rank 1 has no file descriptor left: 3 of 3\."):
        session.client  # noqa: B018
    assert "idle" in session.status().rows[1].state
    session.run("resource.setrlimit(resource.RLIMIT_NOFILE, before)")
    assert session.run("t = torch.ones(1); dist.all_reduce(t); print(kept, t.item())")[1].stdout == "kept 2.0\n"
    assert session.client[:].apply_sync(os.getpid) == session.ranks.pids()
    shown = capfd.readouterr()
    assert "psutil" not in shown.err and "was lost" not in shown.out + shown.err


@pytest.mark.long
def test_client_and_rpc_without_file_descriptors(make_session, capfd):
    """Both report the exhausted resource, and work again when there are descriptors."""
    session = make_session(2)
    session.run(f"kept = 'kept'{USE_UP_DESCRIPTORS}")
    init_rpc = "from torch.distributed import rpc; rpc.init_rpc(f'w{rank}', rank=rank, world_size=2)"
    with pytest.raises(RankError, match=r"too many open files.*\(rank 1 has no file descriptor left: 300 of 300\)"):
        session.run(init_rpc)
    needs_all = r"needs all ranks, and rank 1 has no file descriptor left: 300 of 300\. Cells go on"
    for most_s in (2.5, 1.0):  # the first one starts the controller
        began = time.monotonic()
        with pytest.raises(ClientError, match=needs_all):
            session.client  # noqa: B018
        assert time.monotonic() - began < most_s
    assert session.status().rows[1].shortages == ("rank 1 has no file descriptor left: 300 of 300",)
    session.run("if rank == 1: [os.close(file) for file in files[-10:]]; del files[-10:]")
    with pytest.raises(ClientError, match=r"rank 1 has too few file descriptors left: 29\d of 300 are in use, and ipy"):
        session.client  # noqa: B018
    assert session.run("g = dist.new_group([0, 1]); t = torch.ones(1); dist.all_reduce(t); print(kept)").ok
    session.run("if rank == 1: [os.close(file) for file in files]")
    assert session.client.ids == [0, 1]
    assert not session.status().rows[1].shortages
    session.ranks.resize(3)
    assert session.run("t = torch.ones(1); dist.all_reduce(t); t.item()")[2].result == "3.0"
    answer = "rpc.rpc_sync(f'w{(rank + 1) % 3}', int, ('5',)) if rank < 3 else 0"
    assert session.run(f"{init_rpc.replace('=2', '=3')}; x = {answer}; rpc.shutdown(); x")[1].result == "5"
    shown = capfd.readouterr()
    assert "psutil" not in shown.err and "was lost" not in shown.out + shown.err


_SIZE = r"[\d.]+ [MG]B"
OUT_OF_MEMORY = (
    rf"rank 1 has (no memory|{_SIZE} of memory) left: {_SIZE} of {_SIZE} "
    r"\((address space, RLIMIT_AS|data, RLIMIT_DATA)\)"
)


@pytest.mark.parametrize("limit", ["AS", "DATA"])
def test_memory_of_a_rank(make_session, limit):
    session = make_session(2)
    session.run(f"kept = 'kept'{USE_UP_MEMORY % limit}")
    with pytest.raises(RankError, match=rf"MemoryError: {OUT_OF_MEMORY}"):
        session.run("bag = []\nif rank == 1:\n    use_up(bag, 32)\n    bag.append(bytearray(1 << 20))")
    with pytest.raises(RankError, match=rf"can't allocate memory.*{OUT_OF_MEMORY}"):
        session.run("if rank == 1: torch.ones(8 << 20)")
    with pytest.raises(RankError, match=rf"MemoryError: {OUT_OF_MEMORY}"):
        session.run(f"'{'x' * 1_000_000}'")  # Python's parser needs more memory for it
    assert session.pull("kept")[1] == "kept"
    check_it_goes_on(session, OUT_OF_MEMORY, "bag.clear()")

    session.run("if rank == 1:\n    use_up(bag, 32)\n    resource.setrlimit(KIND, before)")
    assert session.run("x = torch.ones(8 << 20); dist.all_reduce(x); print(x[0].item())")[1].stdout == "2.0\n"


@pytest.mark.long
def test_the_compiler_fails_without_a_word(make_session):
    """Without memory, the parser of Python 3.11 sometimes sets no exception. The test raises the error of that case."""
    session = make_session(2)
    raises = "SystemError('<built-in function compile> returned NULL without setting an exception')"
    fails = f"def fail(*_, **__): raise {raises}\nget_ipython().compile.ast_parse = fail"
    session.run(f"{USE_UP_MEMORY % 'DATA'}\nbag = []\n{fails}\nif rank == 1: use_up(bag, 32)")
    with pytest.raises(RankError) as raised:
        session.run("1")
    said = str(raised.value)
    assert re.search(rf"MemoryError: {OUT_OF_MEMORY} \(rank 1\)", said), said
    assert "SystemError: <built-in function compile> returned NULL" in said  # rank 0 has memory


@pytest.mark.long
def test_a_stop_without_memory(make_session):
    session = make_session(2)
    session.run(f"kept = 'kept'{USE_UP_MEMORY % 'AS'}")
    loop = "bag = []\nwhile rank == 1:\n    use_up(bag, 32)"
    for code in (loop, f"{loop}\n    dist.barrier()", "dist.barrier() if rank == 1 else time.sleep(100)"):
        with pytest.raises(CellTimeoutError):
            assert took_s(session.run, code, timeout_s=1.0) < 4.0
        assert session.run("print(kept)")[1].stdout == "kept\n"


def test_the_state_of_a_rank_is_read_with_its_reserve(make_session):
    """A rank without memory still reports its state: it reads the state again with the reserve."""
    session = make_session(1)
    session.run(
        "from ddp_notebook.rank import reserve\n"
        "from ddp_notebook.rank.group.network import Network\n"
        "def vitals(network, read=Network.vitals):\n"
        "    if not reserve._lent: raise MemoryError\n"
        "    return read(network)\n"
        "Network.vitals = vitals"
    )
    assert session.status().rows[0].state == "idle"


@pytest.mark.long
def test_a_thread_that_takes_all_memory(make_session):
    """The thread also takes the reserve when a rank uses it. No cell is lost: each one ends, even if it is not read."""
    session = make_session(2)
    session.run(f"kept = 'kept'{USE_UP_MEMORY % 'AS'}")
    with contextlib.suppress(RankError):
        session.run(
            "def take_all():\n"
            "    bag, until = [], time.monotonic() + 5.0\n"
            "    while time.monotonic() < until:\n"
            "        use_up(bag, 1024)\n"
            "        time.sleep(0.001)\n"
            "if rank == 1:\n    threading.Thread(target=take_all).start()\n    time.sleep(1.0)"
        )
    began = time.monotonic()
    for size in (10, 100_000, 1_000_000):
        with contextlib.suppress(RankError):
            session.run(f"'{'x' * size}'[0]", quiet=True)
        assert time.monotonic() - began < 15.0
    wait_until(lambda: "left" not in repr(session.status()))
    assert session.run("t = torch.ones(1); dist.all_reduce(t); print(kept, t.item())")[1].stdout == "kept 2.0\n"


@AS_ROOT
def test_threads_of_a_rank(make_session):
    session = make_session(2)
    assert int(session.run(f"kept = 'kept'{USE_UP_THREADS}")[1].stdout) < 10
    sentence = r"rank 1 can start no thread or process: \d+ of \d+ \(of user 54321, RLIMIT_NPROC\)"
    with pytest.raises(RankError, match=f"can't start new thread.*{sentence}"):
        session.run("threading.Thread(target=print).start()")
    assert re.search(sentence, repr(session.status()))
    with pytest.raises(RankError, match=rf"BlockingIOError.*{sentence}"):
        session.run("if rank == 1: os.fork()")
    assert took_s(session.run, "print(rank)") < 2.0
    with pytest.raises(CellTimeoutError):
        session.run(_NOT_ENTERED, timeout_s=0.5)

    session.run("if rank == 1: go.set(); [thread.join() for thread in threads]")
    session.run("if rank == 1: resource.setrlimit(resource.RLIMIT_NPROC, before)")
    session.run("t = torch.ones(1); dist.all_reduce(t)")
    assert session.run("print(kept, t.item())")[1].stdout == "kept 2.0\n"
    assert "thread or process" not in repr(session.status())


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """Mount a small file system in memory."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def controlled_by(controller: str, limit: str) -> Path:
    """Create a cgroup with this limit, in version 1 or 2. Skip the test if this is not possible."""
    name = f"ddp_notebook-test-{uuid.uuid4().hex}"
    for root in (Path("/sys/fs/cgroup", controller), Path("/sys/fs/cgroup")):
        folder = root / name
        if (root / "cgroup.procs").exists():
            with contextlib.suppress(OSError):
                folder.mkdir()
            if (folder / limit).exists():
                return folder
            with contextlib.suppress(OSError):
                folder.rmdir()
    pytest.skip(f"no cgroup with {limit} can be made: the cgroups are read-only, or their controller is elsewhere")


@pytest.fixture
def pids_cgroup():
    yield (folder := controlled_by("pids", "pids.max"))
    wait_until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.fixture
def memory_cgroup():
    """Create a cgroup of 1,200 MiB."""
    version_1 = Path("/sys/fs/cgroup/memory").exists()
    folder = controlled_by("memory", limit := "memory.limit_in_bytes" if version_1 else "memory.max")
    (folder / limit).write_text(str(1200 << 20))
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.mark.long
@AS_ROOT
def test_processes_of_a_cgroup(pids_cgroup, make_session):
    session = make_session(2)
    session.run(f"""
import os, threading
kept, go, threads = "kept", threading.Event(), []
if rank == 1:
    open("{pids_cgroup}/cgroup.procs", "w").write(str(os.getpid()))
    open("{pids_cgroup}/pids.max", "w").write(str(len(os.listdir("/proc/self/task")) + 6))
    try:
        while True:
            threads.append(threading.Thread(target=go.wait))
            threads[-1].start()
    except RuntimeError: threads.pop()
""")
    sentence = rf"rank 1 can start no thread or process: \d+ of \d+ \(pids of the cgroup {pids_cgroup}\)"
    with pytest.raises(RankError, match=rf"can't start new thread.*{sentence}"):
        session.run("threading.Thread(target=print).start()")
    with pytest.raises(RankError, match=rf"BlockingIOError.*{sentence}"):
        session.run("if rank == 1: os.fork()")
    assert re.search(sentence, repr(session.status()))
    with pytest.raises(CellTimeoutError):
        session.run(_NOT_ENTERED, timeout_s=0.5)
    assert took_s(session.run, "print(rank)") < 2.0
    session.run("go.set(); [thread.join() for thread in threads]")
    session.run("t = torch.ones(1); dist.all_reduce(t)")
    assert session.run("print(kept, t.item())")[1].stdout == "kept 2.0\n"
    assert "thread or process" not in repr(session.status())


def in_program(program: str, *before: str, **env: str) -> list[str]:
    """Return the lines that a program prints."""
    command = [*before, sys.executable, "-c", program]
    env = {**os.environ, "PYTHONPATH": str(_ROOT), **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()


@pytest.mark.long
@AS_ROOT
def test_the_oom_killer(memory_cgroup):
    """The error of a rank names the OOM killer only if it has killed the rank."""
    lines = in_program(f"""
import os, re, signal, ddp_notebook
open("{memory_cgroup}/cgroup.procs", "w").write(str(os.getpid()))
session = ddp_notebook.start(2)
session.run("kept = 'kept'", quiet=True)
def kill(code):
    try:
        session.run(code, quiet=True)
    except ddp_notebook.DDPNotebookError as error:
        print(str(error).splitlines()[0])
kill("if rank == 1: x = b'1' * (2 << 30)")
print(session.ranks.heal())
print(session.run("kept", ranks=0, quiet=True)[0].result)
kill("if rank == 1:\\n    import os; os.kill(os.getpid(), 9)")
""")
    limit = f"1.3 GB (memory of the cgroup {memory_cgroup})"
    assert f"killed by SIGKILL: the kernel's OOM killer ended it; the limit is {limit}" in lines[0], lines
    assert "no rank has died" not in lines[1]
    assert lines[2] == "'kept'"
    assert "killed by SIGKILL" in lines[3] and "OOM" not in lines[3]


@pytest.mark.long
@AS_ROOT
def test_shared_memory_of_a_rank():
    """Samples of a DataLoader do not fit into /dev/shm. Pulls and pushes do not use it."""
    lines = in_program(
        """
import ddp_notebook, numpy
session = ddp_notebook.start(2)
def failed(code):
    try:
        session.run(code, quiet=True)
        print("went well")
    except ddp_notebook.RankError as error:
        print(str(error).replace("\\n", " "))
data = "torch.utils.data.DataLoader(torch.ones(64, 1 << 16), batch_size=32, num_workers=1)"
failed(f"loader = {data}\\nif rank == 1: list(loader)")
failed("if rank == 1: torch.ones(2 << 20).share_memory_()")
session.run("kept = 'kept'; large = torch.ones(1 << 22).numpy()", quiet=True)
print(session.pull("large")[1].sum())
session.push({"sent": numpy.ones(1 << 22)})
print(session.run("sent.sum().item()", quiet=True)[1].result)
print(session.run("t = torch.ones(1); dist.all_reduce(t); t.item()", quiet=True)[1].result)
full = "open('/dev/shm/full', 'wb')"
session.run(f"{full}.truncate(0)\\ntry: {full}.write(bytes(8 << 20))\\nexcept OSError: pass", ranks=1, quiet=True)
print([line for line in repr(session.status()).splitlines() if "/dev/shm" in line])
""",
        *("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"', "sh"),
    )
    sentence = r"rank 1 has (no|too little) space left in /dev/shm: [\d.]+ [kM]?B of 4\.2 MB"
    assert re.search(sentence, lines[0]), lines
    assert re.search(sentence, lines[1]), lines
    assert [float(line.strip("'")) for line in lines[2:5]] == [4194304.0, 4194304.0, 2.0]
    assert "'rank 1 has no space left in /dev/shm: 4.2 MB of 4.2 MB'" in lines[5]


@AS_ROOT
@pytest.mark.parametrize(
    ("options", "sentence", "use_up"),
    [
        (
            "size=1m",
            "rank 1 has no space left in {folder}: 1.0 MB of 1.0 MB",
            "open('full', 'wb').write(bytes(1 << 21))",
        ),
        (
            "nr_inodes=20",
            "rank 1 can make no further file in {folder}: 20 of 20",
            "[open(str(n), 'w') for n in range(30)]",
        ),
    ],
    ids=["bytes", "files"],
)
def test_the_disk_of_a_rank(make_session, tmp_path, options, sentence, use_up):
    session = make_session(2)
    with mounted(tmp_path / "small", options) as folder:
        session.run(f"import os\nhome = os.getcwd(); kept = 'kept'\nif rank == 1: os.chdir({str(folder)!r})")
        wanted = re.escape(sentence.format(folder=folder))
        with pytest.raises(RankError, match=rf"No space left on device.*\({wanted}\)"):
            session.run(f"if rank == 1: {use_up}")
        check_it_goes_on(session, wanted, "if rank == 1: [os.unlink(file) for file in os.listdir('.')]")
        session.run("os.chdir(home)")


@pytest.mark.long
@AS_ROOT
def test_the_disk_of_the_notebooks_machine(tmp_path):
    """A start reports the full disk. A session without space for its logs continues, and keeps later text again."""
    program = """
import os, pathlib, ddp_notebook
small = pathlib.Path(os.environ["TMPDIR"])
(small / "full").write_bytes(bytes((1 << 20) - (32 << 10)))
session = ddp_notebook.start(2)
session.run("kept = 'kept'; print('x' * 200_000)", quiet=True)
session.run("print(kept)", quiet=True)
(small / "full").unlink()
session.run("print('later')", quiet=True)
print(session.log(1).endswith("later\\n"))
session.stop()
pathlib.Path(os.environ["TMPDIR"], "full").write_bytes(bytes((1 << 20) - 8192))
try:
    while True: os.mkdir(small / str(len(os.listdir(small))))
except OSError: pass
try:
    ddp_notebook.start(2)
except ddp_notebook.StartError as error:
    print(error)
"""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    with mounted(tmp_path / "small", "size=1m,nr_inodes=60") as folder:
        env = {**os.environ, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(run), "PYTHONPATH": str(_ROOT)}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "True"
    assert lines[-1].startswith(f"no space is left in {folder}"), lines
    assert "a part of this rank's text is not kept" in done.stderr


@pytest.mark.long
@AS_ROOT
def test_a_full_runtime_directory(tmp_path):
    """A rank that cannot write its files reports the full disk instead of a traceback."""
    program = """
import os, pathlib, ddp_notebook
small = pathlib.Path(os.environ["XDG_RUNTIME_DIR"])
def fill(rest):
    with open(small / "full", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
        file.truncate(file.tell() - rest)
for rest in (0, 8 << 10, 16 << 10, 32 << 10):
    fill(rest)
    try:
        ddp_notebook.start(2).stop()
        print("started")
    except ddp_notebook.StartError as error:
        print(str(error).replace("\\n", " "))
    (small / "full").unlink()
with ddp_notebook.start(2) as session:
    print(session.run("dist.barrier(); 'went well'", quiet=True)[1].result)
"""
    with mounted(tmp_path / "small", "size=1m,mode=700") as folder:
        *lines, last = in_program(program, XDG_RUNTIME_DIR=str(folder))
    assert last == "'went well'"
    assert not any("Traceback" in line for line in lines), lines
    for line in lines:
        assert line == "started" or re.search(rf"no space (is )?left in {folder}", line), lines


@pytest.mark.slow
@AS_ROOT
@pytest.mark.parametrize("write", ["save", "save_html", "save_trace", "fetch"])
def test_the_disk_that_a_user_writes_to(tmp_path, write):
    """One sentence, and no part of the file remains."""
    recording = simulate(world_size=2, steps=3)
    with mounted(tmp_path / "small", "size=1m") as folder:
        (folder / "full").write_bytes(bytes(1 << 20))
        target = folder / "run.html"
        with pytest.raises(CannotWriteError) as failed:
            if write == "fetch":
                with Landing(overwrite=True) as landing:
                    landing.write(target, bytes(1 << 20))
            else:
                getattr(recording, write)(target)
        assert os.listdir(folder) == ["full"]
    full = re.escape(f"the notebook has no space left in {folder}: 1.0 MB of 1.0 MB; name another folder")
    assert re.match(f"{re.escape(str(target))} cannot be written here: {full}", str(failed.value))
    assert failed.value._render_traceback_() == [f"CannotWriteError: {failed.value}"]


def test_file_descriptors_of_the_notebook(make_session):
    """The notebook itself has none: a start reports it, and the running session continues."""
    session = make_session(2)
    session.run("kept = 'kept'")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(300, len(os.listdir("/proc/self/fd")) + 20), before[1]))
        with contextlib.suppress(OSError):
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        assert session.run("print(kept)")[1].stdout == "kept\n"
        assert "idle" in repr(session.status())
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    wait_until(lambda: session.run("print(kept)", quiet=True)[1].stdout == "kept\n")


@pytest.mark.long
def test_file_descriptors_of_the_host_server(make_session):
    """Cells continue and no variable is lost. A heal reports why it cannot start a rank."""
    session = make_session(2)
    session.run("import os; kept = 'kept'")
    server = int(session.run("os.getppid()", ranks=0, quiet=True)[0].result)
    used = set(os.listdir(f"/proc/{server}/fd"))
    free = next(number for number in range(1000) if str(number) not in used)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (free, free))

    assert session.run("print(kept)")[1].stdout == "kept\n"
    with pytest.raises(CellTimeoutError):
        session.run(_NOT_ENTERED, timeout_s=0.5)
    assert "idle" in repr(session.status())
    with pytest.raises(RankDiedError):
        session.run("if rank == 1: os.kill(os.getpid(), 9)")
    with pytest.raises(DDPNotebookError, match=r"the host server has no file descriptor left: \d+ of \d+"):
        session.ranks.heal()
    assert session.run("print(kept)", ranks=0)[0].stdout == "kept\n"
    assert "died" in repr(session.status())
    session.stop()
    session = make_session(2)
    assert session.run("t = torch.ones(1); dist.all_reduce(t); print(t.item())")[1].stdout == "2.0\n"


@pytest.mark.long
def test_a_start_without_file_descriptors():
    """The notebook has too few descriptors. ZeroMQ would end this process, and its variables would be lost."""
    program = """
import os, resource, sys, ddp_notebook
ddp_notebook.start(2).stop()
resource.setrlimit(resource.RLIMIT_NOFILE, (320, 320))
for free in (*range(0, 60, 4), 100):
    files = []
    try:
        while True: files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError: pass
    for file in files[:free]: os.close(file)
    session = None
    try:
        session = ddp_notebook.start(2)
        print(free, "started")
    except ddp_notebook.DDPNotebookError as error:
        print(free, type(error).__name__, str(error).replace("\\n", " "))
    except BaseException as error:
        print(free, "unexpected", repr(error))
    for file in files[free:]: os.close(file)
    if session is not None: session.stop()
with ddp_notebook.start(2) as session:
    session.ranks.pids("controller")
    files = []
    try:
        while True: files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError: pass
    for file in files[:10]: os.close(file)
    try: session.client
    except ddp_notebook.DDPNotebookError as error: print(type(error).__name__, error)
    for file in files[10:]: os.close(file)
    print(session.client.ids)
    print(session.run("dist.barrier(); 'went well'", quiet=True)[1].result)
"""
    *lines, client, ids, last = in_program(program)
    assert last == "'went well'" and ids == "[0, 1]"
    assert re.match(r"ClientError process \d+ has too few file descriptors left: \d+ of 320 .* session.client ", client)
    too_few = r"StartError process \d+ has too few file descriptors left: \d+ of 320 are in use, and a start needs \d+"
    for line in lines:
        assert line.endswith("started") or re.search(rf"no file descriptor left: 320 of 320|{too_few}", line), lines
    assert re.match(rf"4 {too_few}", lines[1]), lines
    assert lines[-1].endswith("started")


def test_a_limit_of_file_size_that_ends_a_rank(make_session, tmp_path):
    session = make_session(2)
    write = f"""
import os, resource, signal, time
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, -1))
with open({str(tmp_path / "file")!r}, "wb", buffering=0) as file:
    while True: file.write(bytes(1000))
"""
    with pytest.raises(DDPNotebookError, match=r"killed by SIGXFSZ: files are limited to 2,000 bytes \(RLIMIT_FSIZE\)"):
        session.run(write, ranks=1)
    with pytest.raises(DDPNotebookError, match=r"killed by SIGXCPU($|[^:])"):  # it has another cause
        session.run("import os, signal, time; os.kill(os.getpid(), signal.SIGXCPU); time.sleep(60)", ranks=0)


@pytest.mark.long
def test_limits_of_processor_time_that_end_a_rank(make_session):
    session = make_session(2)
    limit = (
        "import resource, time; now = int(time.process_time()); resource.setrlimit(resource.RLIMIT_CPU, (now + 1, %s))"
    )
    ends = r"killed by %s: it has used its limit of \d+ s of processor time \(%s\)"
    for rank, hard, signal, which in (
        (1, "-1", "SIGXCPU", "RLIMIT_CPU"),
        (0, "now + 1", "SIGKILL", "the hard RLIMIT_CPU"),
    ):
        with pytest.raises(DDPNotebookError, match=ends % (signal, which)):
            session.run(f"{limit % hard}\nwhile True: pass", ranks=rank)
