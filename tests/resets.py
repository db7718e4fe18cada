"""Programs that reset state of the interpreter, and what they are followed by: a stop, and a next cell."""

# ruff: noqa: E501  # programs as one line are easier to compare

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ddp_notebook.errors import RankError
from tests.conftest import wait_until

_EACH_SIGNAL = "import signal\nfor n in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:\n    "
SIGNALS = {
    # Lightning's Trainer does this after each fit
    "handlers put back": _EACH_SIGNAL + "if (h := signal.getsignal(n)) is not None: signal.signal(n, h)",
    "default handlers": _EACH_SIGNAL + "signal.signal(n, signal.SIG_DFL)",
    "default handlers, except SIGINT's": _EACH_SIGNAL + "n == signal.SIGINT or signal.signal(n, signal.SIG_DFL)",
    "ignoring handlers": _EACH_SIGNAL + "n == signal.SIGINT or signal.signal(n, signal.SIG_IGN)",
    "handlers that do nothing": _EACH_SIGNAL + "n == signal.SIGINT or signal.signal(n, lambda *_: None)",
    "default handlers by C": (
        "import ctypes, signal\nlibc = ctypes.CDLL(None)\n"
        "for n in range(1, 65): n in (signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP) or libc.signal(n, None)"
    ),
    "all unblocked": "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())",
    "no mask": "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, [])",
    "all blocked": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "all blocked by C": (
        "import ctypes\nlibc, everything = ctypes.CDLL(None), ctypes.create_string_buffer(128)\n"
        "libc.sigfillset(everything); libc.pthread_sigmask(2, everything, None)"
    ),
    "no mask and default handlers": (
        "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, [])\n"
        + _EACH_SIGNAL
        + "signal.signal(n, signal.SIG_DFL)"
    ),
    "no mask and default handlers by C": (
        "import ctypes, signal\nlibc = ctypes.CDLL(None)\n"
        "for n in range(1, 65): n in (signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP) or libc.signal(n, None)\n"
        "libc.pthread_sigmask(2, ctypes.create_string_buffer(128), None)"
    ),
    "a handler from a library": "import signal, faulthandler\nsignal.signal(signal.SIGINT, signal.default_int_handler)",
    "another wakeup descriptor": "import os, signal; r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w); os.close(w)",
    "no wakeup descriptor": "import signal; signal.set_wakeup_fd(-1)",
    "restarted calls": _EACH_SIGNAL + "signal.siginterrupt(n, False)",
    "faulthandler off": (
        "import faulthandler, signal\nfaulthandler.disable(); faulthandler.cancel_dump_traceback_later()\n"
        "for n in range(34, 65): faulthandler.unregister(n)"
    ),
    "faulthandler on": (
        "import faulthandler, os\nfaulthandler.enable(file=open(os.devnull, 'w'))\n"
        "faulthandler.dump_traceback_later(600, file=open(os.devnull, 'w'))"
    ),
    "faulthandler at each signal": (
        "import faulthandler, os, signal\nfile = open(os.devnull, 'w')\n"
        "for n in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGFPE, "
        "signal.SIGABRT, signal.SIGBUS, signal.SIGILL}: faulthandler.register(n, file=file)"
    ),
    "another signal module": "import sys\ndel sys.modules['signal']\nimport signal; "
    + _EACH_SIGNAL
    + "signal.signal(n, signal.SIG_DFL)",
    "an alarm": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)"
    ),
    "an alarm once": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(1)",
    "a reloaded signal module": "import importlib, signal; importlib.reload(signal)",
}
_CLOCKS = "perf_counter", "monotonic", "time", "perf_counter_ns", "monotonic_ns", "time_ns"
CLOCKS = {
    "perf_counter stands": "import time; time.perf_counter = lambda: 0.0",
    "perf_counter is no number": "import time; time.perf_counter = lambda: float('nan')",
    "perf_counter is text": "import time; time.perf_counter = str",
    "monotonic stands": "import time; time.monotonic = lambda: 0.0",
    "monotonic_ns stands": "import time; time.monotonic_ns = lambda: 0",
    "clocks that run backwards": (
        "import itertools, time\n"
        + "".join(f"time.{name} = lambda c=itertools.count(0, -1): next(c)\n" for name in _CLOCKS)
    ),
    "clocks that fail": (
        "import time\ndef fail(*_): raise ZeroDivisionError\n" + "".join(f"time.{name} = fail\n" for name in _CLOCKS)
    ),
    "a sleep that returns": "import time; time.sleep = lambda _: None",
    "a frozen clock in each module": (  # as freezegun does it
        "import sys, time\nfrozen = {id(getattr(time, n)): lambda: 7 for n in ("
        + ", ".join(map(repr, _CLOCKS))
        + ")}\n"
        "for module in list(sys.modules.values()):\n"
        "    for name, value in list(getattr(module, '__dict__', {}).items()):\n"
        "        if id(value) in frozen: setattr(module, name, frozen[id(value)])"
    ),
    "a deleted time module": "import sys; import time; del sys.modules['time']",
}
STREAMS = {
    "no stdout": "import sys; sys.stdout = sys.stderr = None",
    "deleted streams": "import sys; del sys.stdout, sys.stderr",
    "closed streams": "import sys; sys.stdout.close(); sys.stderr.close()",
    "a stream that fails": (
        "import sys\nclass Bad:\n    def __getattr__(self, name): raise RuntimeError(name)\nsys.stdout = sys.stderr = Bad()"
    ),
    "no fd 1 and 2": "import os; os.close(1); os.close(2)",
    "fd 1 and 2 elsewhere": "import os; n = os.open(os.devnull, os.O_RDWR); os.dup2(n, 1); os.dup2(n, 2)",
    "no low descriptors": "import os, sys\nfor fd in (0, 1, 2): os.close(fd)",
    "a detached stdout": "import sys; sys.stdout.detach()",
}
MODULES = {
    "reloaded modules": (
        "import importlib, os, time, threading, json, signal, logging\n"
        "for m in (os, time, json, signal, logging): importlib.reload(m)"
    ),
    "os functions": (
        "import os\ndef fail(*_, **__): raise OSError('no')\n"
        "for n in ('getpid', 'write', 'read', 'kill', 'close', 'getcwd', 'fstat', 'dup2', 'stat', '_exit', 'getppid', "
        "'open', 'pread'): setattr(os, n, fail)"
    ),
    "json and pickle": (
        "import json, pickle\ndef fail(*_, **__): raise ValueError('no')\n"
        "json.dumps = json.loads = json.dump = json.load = pickle.dumps = pickle.loads = fail"
    ),
    "threading": (
        "import threading\ndef fail(*_, **__): raise RuntimeError('no')\n"
        "for n in ('Thread', 'Lock', 'RLock', 'Event', 'Condition', 'get_ident', 'main_thread', 'current_thread', "
        "'Timer', 'enumerate'): setattr(threading, n, fail)"
    ),
    "struct, queue, itertools and collections": (
        "import collections, itertools, queue, struct\nfor m in (collections, itertools, queue, struct):\n"
        "    for n in [n for n in dir(m) if not n.startswith('__')]: setattr(m, n, None)"
    ),
    "signal functions": (
        "import signal\ndef fail(*_, **__): raise OSError('no')\n"
        "for n in ('signal', 'getsignal', 'pthread_sigmask', 'pthread_kill', 'raise_signal'): setattr(signal, n, fail)"
    ),
    "deleted modules": (
        "import sys\nfor n in ('os', 'json', 'threading', 'signal', 'struct', 'asyncio', 'IPython', 'traceback', "
        "'logging', 'torch.distributed', 'ddp_notebook', 'zmq'): sys.modules.pop(n, None)"
    ),
    "our modules": "import sys\nfor n in [n for n in sys.modules if n.startswith('ddp_notebook')]: del sys.modules[n]",
    "no modules": "import sys; sys.modules.clear()",
    "wrapped torch.distributed": (
        "def wrap(f):\n    def wrapped(*a, **k):\n        calls.append(f.__name__); return f(*a, **k)\n    return wrapped\n"
        "calls = []\nfor n in ('all_reduce', 'barrier', 'is_initialized', 'get_rank', 'get_world_size', 'broadcast'): "
        "setattr(dist, n, wrap(getattr(dist, n)))"
    ),
    "torch.distributed fails": (
        "def fail(*_, **__): raise RuntimeError('no')\nkept_dist = dict(vars(dist))\n"
        "for n in ('is_initialized', 'get_rank', 'get_world_size', 'is_available', 'get_backend'): setattr(dist, n, fail)"
    ),
    "traceback and logging": (
        "import logging, traceback, warnings, gc\nlogging.disable(); logging.shutdown(); logging.getLogger().handlers.clear()\n"
        "def fail(*_, **__): raise RuntimeError('no')\ntraceback.format_exc = traceback.format_exception = fail\n"
        "warnings.warn = warnings.filterwarnings = fail; warnings.simplefilter('error'); gc.collect = gc.get_objects = fail"
    ),
    "warnings are errors": "import warnings; warnings.resetwarnings(); warnings.simplefilter('error')",
}
INTERPRETER = {
    "no print": "import builtins; builtins.print = None",
    "no len": "import builtins; builtins.len = None",
    "no isinstance": "import builtins; builtins.isinstance = None",
    "no open": "import builtins; builtins.open = None",
    "no id and type": "import builtins; builtins.id = builtins.type = None",
    "len of a fool": "import builtins; builtins.len = lambda _: 3",
    "deleted builtins": "import builtins\nfor n in ('len', 'isinstance', 'getattr', 'print', 'str', 'dict', 'list', 'int'): delattr(builtins, n)",
    "another __builtins__": "__builtins__ = {'print': print}",
    "no exceptions": "import builtins; builtins.Exception = builtins.KeyboardInterrupt = builtins.BaseException = None",
    "a low recursion limit": "import sys; sys.setrecursionlimit(60)",
    "a trace function": "import sys\ndef trace(frame, event, arg): return trace\nsys.settrace(trace)",
    "a trace function that fails": (
        "import sys\ndef trace(frame, event, arg):\n    if frame.f_code.co_name != 'begun': 1 / 0\nsys.settrace(trace)"
    ),
    "a profile function": "import sys, threading\nsys.setprofile(lambda *_: None); threading.setprofile(lambda *_: None)",
    "excepthook": "import sys, threading\nsys.excepthook = threading.excepthook = sys.unraisablehook = None",
    "displayhook": "import sys; sys.displayhook = None",
    "no garbage collection": "import gc; gc.disable(); gc.set_threshold(0); gc.freeze()",
    "a collector's callback that fails": "import gc; gc.callbacks.append(lambda *_: 1 / 0)",
    "a slow switch of threads": "import sys; sys.setswitchinterval(0.5)",
    "exit handlers": "import atexit; atexit._clear()",
    "run exit handlers": "import atexit; atexit._run_exitfuncs()",
    "an audit hook": "import sys; sys.addaudithook(lambda *_: None)",
    "no path": "import sys; sys.path.clear(); sys.meta_path.clear(); sys.path_hooks.clear(); sys.path_importer_cache.clear()",
    "no _oh": "_oh = 5",
    "no Out and In": "Out = In = _ih = _dh = _oh = None",
    "deleted names": "del _oh, Out, In, _ih, _dh, get_ipython, rank, torch, dist",
    "names of ours": "_oh = In = Out = _ = __ = ___ = _i = _ih = _dh = display = get_ipython = open = exit = quit = log = device = 7",
}
IPYTHON = {
    "no ipython hooks": (
        "ip = get_ipython()\nfor n in ip.events.callbacks: ip.events.callbacks[n].clear()\n"
        "ip.input_transformers_post.clear(); ip.ast_transformers.clear(); ip.input_transformers_cleanup.clear()"
    ),
    "no history": "ip = get_ipython(); ip.history_manager.input_hist_raw.clear(); ip.history_manager.enabled = False; ip.execution_count = -5",
    "a showtraceback that fails": "def fail(*_, **__): raise RuntimeError('no')\nip = get_ipython(); ip.showtraceback = ip._showtraceback = fail",
}
ENVIRONMENT = {
    "no environment": "import os; os.environ.clear()",
    "a working directory that is gone": "import os, tempfile\nd = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "nothing in /tmp": "import os, tempfile; tempfile.tempdir = '/nowhere'; os.environ['TMPDIR'] = '/nowhere'",
    "a umask": "import os; os.umask(0o777)",
    "a limit of file size": "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
    "another process group": "import os\ntry: os.setpgid(0, 0)\nexcept OSError: pass",
    "locale": "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    "low priority": "import os; os.nice(5)",
}
LOOPS = {
    "no event loop": "import asyncio; asyncio.set_event_loop(None)",
    "another event loop": "import asyncio; asyncio.set_event_loop(asyncio.new_event_loop())",
    "another policy": "import asyncio; asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())",
    "a stopped event loop": "import asyncio; asyncio.get_running_loop().stop()",
    "a closed event loop": "import asyncio\ntry: asyncio.get_running_loop().close()\nexcept RuntimeError: pass",
    "cancelled tasks": ("import asyncio\nfor task in asyncio.all_tasks(): task.cancel()"),
    "a loop inside the loop": (  # as nest_asyncio does it
        "import asyncio\nloop = asyncio.get_running_loop(); asyncio._set_running_loop(None)\n"
        "inner = asyncio.new_event_loop(); inner.run_until_complete(asyncio.sleep(0)); inner.close()\n"
        "asyncio._set_running_loop(loop)"
    ),
    "no running loop": "import asyncio; asyncio._set_running_loop(None)",
    "an exception handler of the loop": "import asyncio; asyncio.get_running_loop().set_exception_handler(lambda *_: 1 / 0)",
    "a handler of signals of the loop": "import asyncio, signal; asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)",
}
TORCH = {
    "another default device": "torch.set_default_device('meta')",
    "another default dtype": "torch.set_default_dtype(torch.float64)",
    "no gradients": "torch.set_grad_enabled(False); torch.inference_mode().__enter__()",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True); torch.autograd.set_detect_anomaly(True)",
    "one thread": "torch.set_num_threads(1)",
    "tensor methods": "def fail(*_, **__): raise RuntimeError('no')\nkept_repr = torch.Tensor.__repr__; torch.Tensor.__repr__ = fail; torch.Tensor.numel = fail",
    "torch functions": "def fail(*_, **__): raise RuntimeError('no')\nfor n in ('is_tensor', 'is_grad_enabled', 'no_grad', 'device'): setattr(torch, n, fail)",
    "print options": "torch.set_printoptions(profile='full'); torch.set_warn_always(True)",
}
KINDS = {
    "signals": SIGNALS,
    "clocks": CLOCKS,
    "streams": STREAMS,
    "modules": MODULES,
    "interpreter": INTERPRETER,
    "ipython": IPYTHON,
    "environment": ENVIRONMENT,
    "loops": LOOPS,
    "torch": TORCH,
}
PROGRAMS = {f"{kind}: {name}": code for kind, programs in KINDS.items() for name, code in programs.items()}
# IPython cannot run the next statement of these: the cell fails by itself.
FAIL = {
    "interpreter: no id and type",
    "interpreter: deleted builtins",
    "interpreter: a trace function that fails",
    "modules: no modules",
}

_SET_UP = """
if "begun" not in globals():  # an earlier program may have replaced these functions
    def begun(name, _open=__import__("os").open, _close=__import__("os").close):
        _close(_open(name + str(rank_), 66))  # O_CREAT and O_RDWR
    import time
    sleep_, barrier_ = time.sleep, dist.barrier
rank_, kept = rank, rank + 10
"""
WAITS = {
    "a loop": "while True: pass",
    "a sleep": "sleep_(600)",
    "an operation": "if rank_: sleep_(600)\nelse: barrier_()",
    "a long call": "_ = sum(range(3 * 10**7))",
}
AFTER = """
x_ = torch.ones(1, device='cpu', dtype=torch.float32); dist.all_reduce(x_); print('text', int(x_.item()), kept - rank)
"""


def reset_stop_and_go_on(session: Any, program: str, wait: str, directory: Path) -> None:
    """Run the program, press stop while its cell waits, and check that the next cell finds everything."""
    session.run(_SET_UP)
    code = f"{PROGRAMS[program]}\nbegun({str(directory / 'begun-')!r})\n{WAITS[wait]}"
    ends_with = RankError if program in FAIL else KeyboardInterrupt
    with pytest.raises(ends_with):
        run_until_stopped(session, code, directory)
    after = session.run(AFTER, timeout=30, quiet=True)
    assert [after[rank].stdout for rank in after.ranks] == ["text 2 10\n"] * 2


def run_until_stopped(session: Any, code: str, directory: Path) -> None:
    """Run a cell, and press stop once when both ranks have passed its `begun`."""
    ended = threading.Event()

    def press() -> None:
        wait_until(lambda: ended.is_set() or len(list(directory.glob("begun-*"))) == 2, 20, "the cell's begin")
        if not ended.wait(0.1):
            os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    try:
        session.run(code, timeout=40, quiet=True)
    finally:
        ended.set()
        presses.join()
