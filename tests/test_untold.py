"""Operations whose message is partly sent when the peer dies. gloo does not end them, see
`ddp_notebook/rank/group/connections/stuck_waits.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PEER_DIES = """if True:
    import multiprocessing, os, signal, sys, threading, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from ddp_notebook.rank.group.connections import sockets, stuck_waits

    which, file = sys.argv[1:]

    def join(rank):
        before = set(sockets.listeners())
        dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
        return set(sockets.gloo_listeners(before))

    def peer():
        join(1)
        message = torch.ones(2**26)  # 256 MB: far more than a connection holds
        if which == "sends":
            work = dist.irecv(message, 0)
        dist.barrier()
        if which == "receives":
            dist.send(message, 0)
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=peer, daemon=True)
    process.start()
    own = join(0)
    message, errors = torch.zeros(2**26), []

    def operate():
        try:
            dist.send(message, 1) if which == "sends" else dist.recv(message, 1)
        except RuntimeError as error:
            errors.append(str(error))

    dist.barrier()
    if which == "sends":
        os.kill(process.pid, signal.SIGSTOP)
    thread = threading.Thread(target=operate, daemon=True)
    thread.start()
    buffer_type, _ = stuck_waits._gloo()
    while not list(stuck_waits._waits(buffer_type)):
        pass
    while which == "receives" and not message[0]:
        pass  # until some of it has come
    process.kill()
    process.join()
    waits, until = stuck_waits.StuckWaits(), time.monotonic() + 5
    told = 0
    while thread.is_alive() and time.monotonic() < until:
        sockets.cut_groups(own)
        told += waits.tell()
        time.sleep(0.02)
    print(told, errors, thread.is_alive())
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize("which", ["sends", "receives"])
def test_what_waits_with_a_peer_that_died_ends(tmp_path, which):
    command = [sys.executable, "-c", _PEER_DIES, which, str(tmp_path / "store")]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert shown.stdout == "1 ['this operation was aborted to end the cell'] False\n", shown
