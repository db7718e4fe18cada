"""Ranks without a notebook: recorded scripts, with a process for each rank."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LIMIT_S = 60.0  # a rank that has not ended by then hangs

# Two steps in DDP, in a function, so that the model lives until its end.
_MAIN = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    {end}
if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a script, and the expected result of its ranks."""

    code: str
    status: int = 0
    last_words: str = ""  # text on stderr; "": no output


ENDINGS = {
    "destroyed, then the model ends": Ending(code="dist.destroy_process_group()"),
    "not destroyed": Ending(code="pass"),
    "sys.exit": Ending(code="sys.exit(3)", status=3),
    "sys.exit when destroyed": Ending(code="dist.destroy_process_group(); sys.exit(0)"),
    "an exception": Ending(code="raise ValueError('no more')", status=1, last_words="ValueError: no more"),
    "nobody waits for the last operation": Ending(
        code="dist.all_reduce(torch.ones(5), async_op=True); dist.isend(torch.ones(5), 1 - dist.get_rank())\n"
        "    dist.recv(torch.ones(5), 1 - dist.get_rank()); dist.barrier()"
    ),
    "sub-groups and a thread": Ending(
        code="import threading; pair = dist.new_group([0, 1])\n"
        "    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=pair)); thread.start()\n"
        "    dist.barrier(); thread.join(); dist.destroy_process_group()"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A finished process of a rank."""

    status: int | None  # None: it hung and was killed
    stderr: str


def script(directory: Path, end: str) -> Path:
    """Write a training script with this end."""
    path = directory / "train.py"
    path.write_text(_MAIN.replace("{end}", end))
    return path


def environment(records: Path | None) -> dict[str, str]:
    """Return the environment of a rank that is recorded into a directory."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("DDP_NOTEBOOK_RECORD", None)
    return env if records is None else {**env, "DDP_NOTEBOOK_RECORD": str(records)}


def run_endings(directory: Path, names: Sequence[str]) -> dict[str, list[Ended]]:
    """Run a script for each ending, on two ranks that are recorded into `directory / name`.

    torch is imported once: the ranks are forks of a process that does nothing else, and end like any other process.
    """
    for name in names:
        (directory / name).mkdir(parents=True)
        script(directory / name, ENDINGS[name].code)
    command = [sys.executable, "-m", "tests.recording.scripts", str(directory), *names]
    subprocess.run(command, env=environment(None), cwd=ROOT, timeout=30 + _LIMIT_S * len(names), check=True)
    return {name: [_ended(directory / name, rank) for rank in (0, 1)] for name in names}


def _ended(directory: Path, rank: int) -> Ended:
    status = (directory / f"status{rank}").read_text()
    stderr = (directory / f"stderr{rank}").read_text()
    return Ended(status=int(status) if status else None, stderr=stderr)


def _fork_ranks(directory: Path) -> bool:
    """Run the script there on two forks of this process, and write how they end. Return whether this is a fork."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in (0, 1):
        if pid := os.fork():
            pids.append(pid)
            continue
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ["DDP_NOTEBOOK_RECORD"] = str(directory)
        os.dup2(os.open(directory / f"stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
        sys.argv = ["record", str(directory / "train.py")]
        runpy.run_module("ddp_notebook.record", run_name="__main__")
        return True
    until = time.monotonic() + _LIMIT_S
    for rank, pid in enumerate(pids):
        found, status = 0, 0
        while not found and time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        if not found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        (directory / f"status{rank}").write_text(str(os.waitstatus_to_exitcode(status)) if found else "")
    return False


def is_clean(ended: list[Ended], ending: Ending) -> bool:
    """Return whether all ranks have ended as expected, without other output."""
    return all(
        one.status == ending.status
        and (ending.last_words in one.stderr if ending.last_words else not one.stderr)
        and "terminate called" not in one.stderr
        for one in ended
    )


def main() -> None:
    """Run the process that imports the modules of the ranks, which takes most of their time."""
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    import ddp_notebook.rank.record.rank_recording  # noqa: F401

    directory, *names = sys.argv[1:]
    for name in names:
        if _fork_ranks(Path(directory) / name):
            return


if __name__ == "__main__":
    main()
