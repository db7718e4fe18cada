"""Resources of a rank are used up for real in kept sessions and on other hosts: `tests/test_exhausted` has the others.

One sentence contains the rank, the resource, the amount in use and the limit. Nothing waits, commands report the
truth, and everything works again when the resource is available.
"""

from __future__ import annotations

import re

import pytest

from tests.conftest import is_within
from tests.keep.conftest import notebook, runtime  # noqa: F401  # fixtures
from tests.ssh import sshd
from tests.test_exhausted import (
    _SIZE,
    AS_ROOT,
    OUT_OF_MEMORY,
    USE_UP_DESCRIPTORS,
    USE_UP_MEMORY,
    USE_UP_THREADS,
    mounted,
)

pytestmark = [pytest.mark.long, AS_ROOT]
# resource: (uses it up on rank 1, needs it, its sentence, makes it available again). The last two change the user.
_RESOURCES = {
    "file descriptors": (
        USE_UP_DESCRIPTORS,
        "open('/etc/hostname').close()",
        "rank 1 has no file descriptor left: 300 of 300",
        "for file in files: os.close(file)\n    resource.setrlimit(resource.RLIMIT_NOFILE, before)",
    ),
    "memory": (
        f"{USE_UP_MEMORY % 'AS'}\nbag = []\nif rank == 1: use_up(bag, 32)",
        "if rank == 1: bag.append(bytearray(1 << 20))",
        OUT_OF_MEMORY,
        "bag.clear(); resource.setrlimit(KIND, before)",
    ),
    "data": (
        f"{USE_UP_MEMORY % 'DATA'}\nbag = []\nif rank == 1: use_up(bag, 32)",
        "if rank == 1: torch.ones(8 << 20)",
        OUT_OF_MEMORY,
        "bag.clear(); resource.setrlimit(KIND, before)",
    ),
    "disk": (
        "import os\nhome = os.getcwd()\nif rank == 1: os.chdir(%r)",
        "if rank == 1: open('full', 'wb').write(bytes(1 << 21))",
        rf"rank 1 has no space left in \S+: {_SIZE} of 1\.0 MB",
        "[os.unlink(file) for file in os.listdir('.')]; os.chdir(home)",
    ),
    "files": (
        "import os\nhome = os.getcwd()\nif rank == 1: os.chdir(%r)",
        "if rank == 1: [open(str(number), 'w') for number in range(60)]",
        r"rank 1 can make no further file in \S+: 50 of 50",
        "[os.unlink(file) for file in os.listdir('.')]; os.chdir(home)",
    ),
    "threads": (
        USE_UP_THREADS,
        "for _ in range(20): threading.Thread(target=go.wait).start()",  # a thread of gloo may just have ended
        r"rank 1 can start no thread or process: \d+ of \d+ \(of user 54321, RLIMIT_NPROC\)",
        "go.set(); [thread.join() for thread in threads]; resource.setrlimit(resource.RLIMIT_NPROC, before)",
    ),
    "processes": (
        USE_UP_THREADS,
        "import time\nchildren = []\nif rank == 1:\n    for _ in range(20):\n"
        "        if (pid := os.fork()) == 0: time.sleep(600); os._exit(0)\n        children.append(pid)",
        r"rank 1 can start no thread or process: \d+ of \d+ \(of user 54321, RLIMIT_NPROC\)",
        "for pid in children: os.kill(pid, 9); os.waitpid(pid, 0)\n"
        "    go.set(); [thread.join() for thread in threads]; resource.setrlimit(resource.RLIMIT_NPROC, before)",
    ),
}


def check(kernel, resource: str, small: str) -> None:
    """Use up a resource of rank 1, run every kind of command, and make it available again."""
    use_up, needs_it, sentence, free = _RESOURCES[resource]
    where = f"{resource}: "
    first = kernel.run(f"%%on_all_ranks\nkept = 'kept'\n{use_up % (small,) if '%r' in use_up else use_up}")
    assert first.status == "ok", where + first.traceback
    failed = kernel.run(f"%%on_all_ranks\n{needs_it}")
    assert failed.ename == "RankError" and re.search(sentence, failed.evalue), where + failed.evalue
    assert "ddp_notebook/" not in failed.traceback
    assert re.search(sentence, (status := kernel.run("%ddp_status")).stdout), where + status.stdout
    assert kernel.run("%ddp_heal").stdout == "no rank has died\n"
    deadlock = kernel.run("%%on_all_ranks --timeout 0.5\nif rank == 0: dist.all_reduce(torch.ones(1))")
    assert deadlock.ename == "CellTimeoutError" and is_within(deadlock.duration_s, 2.0), where + deadlock.evalue
    for line in ("%%on_all_ranks\nprint(rank)", "%ddp_pull kept", "%ddp_report", "%ddp_status"):
        reply = kernel.run(line)
        assert reply.status == "ok" and is_within(reply.duration_s, 2.0), f"{where}{line}: {reply}"
    assert kernel.run(f"%%on_all_ranks\nif rank == 1:\n    {free}").status == "ok"
    assert not re.search(sentence, kernel.run("%ddp_status").stdout), where
    last = kernel.run("%%on_all_ranks\nt = torch.ones(1); dist.all_reduce(t); print(kept, t.item())")
    assert last.stdout.endswith("[0-1] kept 2.0\n"), where + last.stdout


@pytest.mark.parametrize("where", ["kept", "ssh", "kept and ssh"])
def test_each_resource(where, ssh, notebook, tmp_path):  # noqa: F811
    hosts = f"--hosts one:1,two:1 --python {sshd.python(ssh)}" if "ssh" in where else "2"
    kernel = notebook(f"%ddp_start {hosts} {'--keep 1' if 'kept' in where else ''}")
    with mounted(tmp_path / "small", "size=1m") as bytes_, mounted(tmp_path / "few", "nr_inodes=50") as files:
        for resource in _RESOURCES:
            check(kernel, resource, str(files if resource == "files" else bytes_))
    assert kernel.run("%ddp_stop").status == "ok"
