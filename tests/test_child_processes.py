"""The stop button ends processes that the cell waits for. Others of a rank continue until the rank ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from ddp_notebook.launch.processes import descendants
from tests.conftest import is_within, wait_until

_FORK = "import multiprocessing, time\nfork = multiprocessing.get_context('fork')\n"
_JOINED = f"""{_FORK}children = [fork.Process(target=time.sleep, args=(600,)) for _ in range(2)]
for child in children: child.start()
open(begun, 'w')
for child in children: child.join(%s)
"""
_LOADED = """import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        open(begun, 'w')
        time.sleep(600)
"""
_LOOP = "for _ in torch.utils.data.DataLoader(Slow(), num_workers=2): pass\n"
_WAITS = {
    "joined": _JOINED % "",
    "joined with a time limit": _JOINED % "100",
    "torch.multiprocessing": "import time, torch.multiprocessing as mp\n"
    "context = mp.start_processes(lambda _: time.sleep(600), nprocs=2, join=False, start_method='fork')\n"
    "open(begun, 'w')\nwhile not context.join(): pass\n",
    "DataLoader": f"{_LOADED}{_LOOP}",
    "DataLoader in a function": f"{_LOADED}def train():\n    {_LOOP}try: train()\nexcept KeyboardInterrupt: pass\n",
    "DataLoader while the rank computes": f"{_LOADED}data = torch.utils.data.DataLoader(Slow(), num_workers=2)\n"
    "batches = iter(data)\n"
    "def train(batches):\n    while True: torch.ones(100) @ torch.ones(100)\n"
    "batches, one = None, batches\ntrain(globals().pop('one'))\n",
}


def _press_stop(session, code: str, begun) -> float:
    """Run a cell, press the stop button after it has begun, and return the seconds until it has ended."""
    pressed = []

    def press() -> None:
        wait_until(begun.exists, 20)
        time.sleep(0.5)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="the cell was stopped"):
        session.run(f"begun = {str(begun)!r}\n{code}")
    ended = time.monotonic()
    thread.join()
    return ended - pressed[0]


def _children(session) -> list[psutil.Process]:
    """Return the living children of the ranks, without the resource trackers of Python."""
    found = [process for pid in session.ranks.pids() for process in descendants(pid)[1:]]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.alone
@pytest.mark.parametrize(
    "name",
    [name if name in ("joined", "DataLoader") else pytest.param(name, marks=pytest.mark.long) for name in _WAITS],
)
def test_the_stop_button_ends_them(session, tmp_path, name):
    took_s = _press_stop(session, _WAITS[name], tmp_path / "begun")
    assert is_within(took_s, 1.0), "torch waits 5 s for each worker of a DataLoader"
    # The frames of a stopped cell live until the next cell, for `%ddp_debug`, and a loader in them does so too.
    assert session.run("x = torch.ones(1); dist.all_reduce(x); x.item()")[1].result == "2.0"
    wait_until(lambda: not _children(session), what=lambda: f"children continue: {_children(session)}")


@pytest.mark.long
def test_the_workers_of_a_pool_stay(session, tmp_path):
    """The pool is a variable, so it is usable after a stop. It ends with its ranks, as does a daemon of the user."""
    work = f"{_FORK}pool = fork.Pool(2)\nopen(begun, 'w')\npool.map(time.sleep, [1.0] * 2)"
    _press_stop(session, work, tmp_path / "begun")
    assert session.run("pool.map(abs, [-1, -2])")[1].result == "[1, 2]"
    assert len(_children(session)) == 4
    session.run("pool.terminate(); pool.join(); del pool")
    assert not _children(session)
