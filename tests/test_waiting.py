"""A stop ends waits in C++. Otherwise they behave as in torch."""

from __future__ import annotations

import time

import pytest

from ddp_notebook.errors import CellTimeoutError, RankError
from tests.conftest import is_within, wait_until

# The waits of the main thread, and of another thread, which calls torch's own functions.
_BOTH_WAYS = """
import concurrent.futures, tempfile, threading
from datetime import timedelta

def outcome(wait):
    try: return wait()
    except Exception as error: return type(error).__name__, str(error).partition("\\n")[0]

def later(seconds, act):
    timer = threading.Timer(seconds, act); timer.start()

def future(result):
    made = torch.futures.Future()
    later(0.1, lambda: made.set_exception(result) if isinstance(result, Exception) else made.set_result(result))
    return made

def hash_store(*, below=False, comes=False):
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=100 if not comes else 10_000))
    if comes: later(0.1, lambda: store.set("a/x" if below else "x", "1"))
    return dist.PrefixStore("a", store) if below else store

def file_store():
    store = dist.FileStore(tempfile.mktemp(), 2)
    store.set_timeout(timedelta(milliseconds=50))
    return store
"""
_WAITS = {
    "future": "future(5).wait()",
    "future that fails": "future(ValueError('no')).wait()",
    "wait_all": "torch.futures.wait_all([future(1), future(2)])",
    "HashStore.wait": "hash_store().wait(['x'])",
    "HashStore.wait with a timeout": "hash_store(comes=True).wait(['y'], timedelta(milliseconds=50))",
    "HashStore.get": "hash_store(comes=True).get('x')",
    "HashStore.multi_get below a prefix": "hash_store(below=True, comes=True).multi_get(['x'])",
    "FileStore.get": "file_store().get('x')",
    "TCPStore without a port": "dist.TCPStore('localhost')",
}


def test_waits_end_as_torchs_own_do(session):
    table = "{" + ", ".join(f"{name!r}: lambda: {code}" for name, code in _WAITS.items()) + "}"
    result = session.run(
        f"{_BOTH_WAYS}\nwaits = {table}\n"
        "with concurrent.futures.ThreadPoolExecutor(len(waits)) as pool:\n"
        "    others = {name: pool.submit(outcome, wait) for name, wait in waits.items()}\n"
        "    for name, wait in waits.items(): print(name, outcome(wait) == others[name].result(), outcome is None)\n"
        "print(outcome(waits['future']), outcome(waits['HashStore.get']), outcome(waits['future that fails']))",
        ranks=0,
        timeout_s=30,
    )
    *compared, values = result[0].stdout.splitlines()
    assert compared == [f"{name} True False" for name in _WAITS]
    assert values.startswith("5 b'1' ('ValueError', 'no")


def test_a_client_says_who_did_not_listen(session):
    result = session.run(
        "import time; from datetime import timedelta; began = time.monotonic()\n"
        "try: dist.TCPStore('localhost', 1, timeout=timedelta(milliseconds=300))\n"
        "except dist.DistNetworkError as error: print(error, 0.2 < time.monotonic() - began < 2)",
        ranks=0,
        timeout_s=20,
    )
    assert result[0].stdout.startswith(
        "The client socket has timed out after 300ms while trying to connect to (localhost, 1): "
    )
    assert result[0].stdout.endswith("True\n")


def test_a_client_may_come_before_its_server(session):
    result = session.run(
        "import socket, threading\n"
        "with socket.socket() as free: free.bind(('localhost', 0)); port = free.getsockname()[1]\n"
        "def serve(): globals().update(kept=dist.TCPStore('localhost', port, is_master=True))\n"
        "threading.Timer(0.3, serve).start()\n"
        "client = dist.TCPStore('localhost', port); client.set('a', 'b'); print(client.get('a')); del client, kept",
        ranks=0,
        timeout_s=20,
    )
    assert result[0].stdout == "b'b'\n"


def test_a_stop_says_where_a_future_was_waited_for(session):
    with pytest.raises(CellTimeoutError, match=r"ranks 0,1: at cell line 2 in deep, in wait_all$"):
        session.run("def deep():\n    torch.futures.wait_all([torch.futures.Future()])\ndeep()", timeout_s=0.5)


def test_what_computes_after_a_stop_is_not_interrupted_again(session):
    code = (
        "import threading, time\nevent = threading.Event()\n"
        "try: event.wait()\n"
        "finally:\n"
        "    until = time.monotonic() + 0.8\n"
        "    while time.monotonic() < until: saved = 'half'\n"
        "    saved = 'whole'\n"
        "    try: event.wait()\n"
        "    finally: saved += ', then left'"
    )
    with pytest.raises(CellTimeoutError):
        session.run(code, timeout_s=0.3)
    assert session.run("print(saved)")[0].stdout == "whole, then left\n"


_SAVES = """
import os, threading, time
from ddp_notebook.rank.engine import RankEngine
from ddp_notebook.wire.signals import INTERRUPT
of_rank, saves = RankEngine.instance()._rank, threading.Event()
def agent():  # it has read the stop's message, and not seen yet that the signal was noticed
    saves.wait()
    of_rank._network.release.ask(of_rank.runner.running[0])
threading.Thread(target=agent).start()
try:
    os.kill(os.getpid(), INTERRUPT)
    time.sleep(60)
finally:
    saves.set()
    until = time.monotonic() + 0.5
    while time.monotonic() < until: saved = "half"
    saved = "whole"
"""


def test_code_after_a_stop_is_not_interrupted_by_its_message(session):
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        session.run(_SAVES)
    assert session.run("print(saved)")[0].stdout == "whole\n"


_GUARDED = """
import os, threading
from ddp_notebook.wire.signals import INTERRUPT
class Guarded:
    lock = threading.Lock()
    def __enter__(self):
        self.lock.acquire()
        os.kill(os.getpid(), INTERRUPT)
        for _ in range(10): pass
    def __exit__(self, *_):
        for _ in range(10): pass
        self.lock.release()
with Guarded():
    reached = "body"
    os.kill(os.getpid(), INTERRUPT)
    for _ in range(10): pass
"""


def test_a_stop_leaves_no_lock_taken(session):
    """An interrupt between the acquiring in an `__enter__` and the block of the `with` would leave the lock taken."""
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        session.run(_GUARDED)
    assert session.run("print(reached, Guarded.lock.locked())")[0].stdout == "body False\n"


_CLOSES = """
import os, time
from ddp_notebook.wire.signals import INTERRUPT
class Closes:
    closed = False
    def __init__(self, for_s): self.for_s = for_s
    def __del__(self):
        if self.for_s < 1: os.kill(os.getpid(), INTERRUPT)
        until = time.monotonic() + self.for_s
        while time.monotonic() < until: pass
        Closes.closed = True
"""


def test_a_stop_in_a_finalizer_is_raised_after_it(session):
    """Python prints an exception that is raised in a `__del__`, and continues."""
    with pytest.raises(RankError, match="KeyboardInterrupt") as stopped:
        session.run(_CLOSES + "Closes(0.05)\nos.kill(os.getpid(), INTERRUPT)\nwhile True: pass")
    result = stopped.value.result
    assert result is not None and result[0].stderr == result[1].stderr == ""
    assert session.run("print(Closes.closed)")[0].stdout == "True\n"


def test_a_stop_ends_a_finalizer_that_does_not_end(session):
    with pytest.raises(CellTimeoutError):
        session.run(_CLOSES + "Closes(60)\nwhile True: pass", timeout_s=0.3)
    assert session.run("print(Closes.closed)")[0].stdout == "False\n"


_IN_CALLBACK = """
import time, weakref
class Key: pass
def spin(for_s):
    until = time.monotonic() + for_s
    while time.monotonic() < until: pass
"""


def test_a_stop_in_a_weakref_callback_is_raised_after_it(session):
    """Python prints an exception that is raised there, and continues. matplotlib has many such callbacks."""
    code = _IN_CALLBACK + "key = Key(); reference = weakref.ref(key, lambda _: spin(2)); del key\nwhile True: pass"
    began_s = time.monotonic()
    with pytest.raises(CellTimeoutError) as stopped:
        session.run(code, timeout_s=0.5)
    assert is_within(time.monotonic() - began_s, 2)
    result = stopped.value.result
    assert result is not None and result[0].stderr == result[1].stderr == ""


def test_a_stop_leaves_no_dead_key_in_a_weak_dictionary(session):
    code = _IN_CALLBACK + (
        "import os\nfrom ddp_notebook.wire.signals import INTERRUPT\n"
        "class Slow(dict):\n"
        "    def __delitem__(self, key): os.kill(os.getpid(), INTERRUPT); spin(0.05); super().__delitem__(key)\n"
        "weak = weakref.WeakKeyDictionary(); weak.data = Slow(); key = Key(); weak[key] = 1\n"
        "del key\nos.kill(os.getpid(), INTERRUPT)\nwhile True: pass"
    )
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        session.run(code)
    assert session.run("print(weak.data)")[0].stdout == "{}\n"


def test_a_stop_ends_the_wait_for_a_lock(session):
    code = "import threading\ntaken = threading.Condition(threading.Lock())\ntaken.acquire()\nwith taken: pass"
    with pytest.raises(CellTimeoutError, match="at cell line 4"):
        session.run(code, timeout_s=0.3)


def test_a_command_after_a_stop_is_not_interrupted_again(session):
    code = (
        "import subprocess, threading\n"
        "try: threading.Event().wait()\n"
        "finally: saved = subprocess.run('sleep 0.8; echo whole', shell=True, capture_output=True, text=True).stdout"
    )
    with pytest.raises(CellTimeoutError):
        session.run(code, timeout_s=0.3)
    assert session.run("print(saved, end='')")[0].stdout == "whole\n"


def test_a_resent_stop_does_not_weaken_the_next_stop(session):
    code = (
        "import _thread, hashlib\nheard = 0\n"
        "try: hashlib.pbkdf2_hmac('sha256', b'', b'', 2_500_000)\n"  # a long call in C without the interpreter's lock
        "except KeyboardInterrupt: heard += 1\n"
        "try: _thread.interrupt_main()\n"
        "except KeyboardInterrupt: heard += 1\n"
    )
    with pytest.raises(CellTimeoutError):
        session.run(code + "raise KeyboardInterrupt", ranks=0, timeout_s=0.3)
    wait_until(lambda: not session._cells.busy, 30.0, "the end of the call in C")
    assert session.run("print(heard)", ranks=0)[0].stdout == "2\n"
