"""Programs that reset state of the interpreter. A stop and another cell follow them."""

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
from tests.reset_functions import FUNCTIONS

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
    "a reloaded signal module": "import importlib, signal; importlib.reload(signal)",
    "another _signal module": "import sys\ndel sys.modules['_signal'], sys.modules['signal']\nimport _signal; "
    + _EACH_SIGNAL
    + "_signal.signal(n, _signal.SIG_DFL)",
    "all blocked by another _signal module": (
        "import sys\ndel sys.modules['_signal'], sys.modules['signal']\n"
        "import _signal; _signal.pthread_sigmask(_signal.SIG_BLOCK, range(1, 65))"
    ),
    "a thread that waits for all signals": (
        "import signal, threading\n"
        "threading.Thread(target=signal.sigwait, args=(signal.valid_signals(),), daemon=True).start()"
    ),
    "a time limit that was met": (
        "import signal\ndef too_long(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, too_long); signal.alarm(600); signal.alarm(0)"
    ),
    "an interrupt at SIGTERM": "import signal; signal.signal(signal.SIGTERM, signal.default_int_handler)",
    "ignored children": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "an end at SIGPIPE": "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "stacks at SIGUSR1": "import faulthandler, os, signal; faulthandler.register(signal.SIGUSR1, open(os.devnull, 'w'), chain=True)",
    # Rarely: CPython reads the frames of running threads without a lock, and can crash at each dump.
    "stacks again and again": "import faulthandler, os; faulthandler.dump_traceback_later(0.3, repeat=True, file=open(os.devnull, 'w'))",
    # last, because in a shared session SIGALRM arrives from here on
    "an alarm": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)"
    ),
    "an alarm once": "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(1)",
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
    "a frozen clock in each module": (  # like freezegun
        "import sys, time\nfrozen = {id(getattr(time, n)): lambda: 7 for n in ("
        + ", ".join(map(repr, _CLOCKS))
        + ")}\n"
        "for module in list(sys.modules.values()):\n"
        "    for name, value in list(getattr(module, '__dict__', {}).items()):\n"
        "        if id(value) in frozen: setattr(module, name, frozen[id(value)])"
    ),
    "a deleted time module": "import sys; import time; del sys.modules['time']",
    "another time zone": "import os, time; os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()",
    "deleted clocks": "import time; del time.perf_counter, time.monotonic, time.time, time.sleep, time.monotonic_ns",
    "a frozen datetime": (
        "import datetime\nclass frozen(datetime.datetime):\n    @classmethod\n    def now(cls, tz=None): return cls(2020, 1, 1)\n"
        "datetime.datetime = frozen"
    ),
    "no select": "import select, selectors; select.select = select.poll = select.epoll = selectors.DefaultSelector = None",
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
    "stdout in a file": "import os, sys; sys.stdout = open(os.devnull, 'w')",
    "streams in memory": "import io, sys; sys.stdout, sys.stderr = io.StringIO(), io.StringIO()",
    "a redirection that is left": "import contextlib, io; contextlib.redirect_stdout(io.StringIO()).__enter__()",
    "stdout in ASCII": "import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict', line_buffering=False)",
    "streams whose flush raises": (
        "import sys\nclass Stops:\n    def write(self, text): return len(text)\n    def flush(self): raise KeyboardInterrupt\n"
        "class Exits(Stops):\n    def flush(self): raise SystemExit(3)\nsys.stdout, sys.stderr = Stops(), Exits()"
    ),
    "streams without methods": "import sys; sys.stdout.flush = sys.stderr.flush = sys.stderr.write = None",
    "a broken pipe": "import os; r, w = os.pipe(); os.dup2(w, 1); os.dup2(w, 2); os.close(r); os.close(w)",
    "no stdin": "import os, sys; sys.stdin = None; os.close(0)",
    "pipes that do not block": "import os; os.set_blocking(1, False); os.set_blocking(2, False)",
    "the first streams": "import sys; sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__",
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
    "a module less and one more": "import sys; del sys.modules['threading']; import tabnanny",
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
    "asyncio functions": (
        "import asyncio\ndef fail(*_, **__): raise RuntimeError('no')\nfor n in asyncio.__all__: setattr(asyncio, n, fail)"
    ),
    "another asyncio": (
        "import sys\nfor n in [n for n in sys.modules if n.partition('.')[0] in ('asyncio', '_asyncio')]: del sys.modules[n]\n"
        "import asyncio"
    ),
    "zmq": "import zmq; zmq.Context = zmq.Poller = zmq.Socket = zmq.Frame = None",
    "NumPy": (
        "import numpy\ndef fail(*_, **__): raise RuntimeError('no')\n"
        "for n in ('frombuffer', 'asarray', 'array', 'empty', 'concatenate', 'zeros', 'ndarray'): setattr(numpy, n, fail)"
    ),
    "psutil": "import psutil; psutil.Process = psutil.pids = psutil.virtual_memory = None",
    "random": "import random; random.seed(0); random.random = random.Random = random.choice = random.getrandbits = None",
    "logging shut down": (
        "import logging\nlogging.disable(); logging.shutdown(); logging.Logger.manager.loggerDict.clear()\n"
        "logging.Logger.handle = logging.Handler.emit = logging.getLogger = None"
    ),
    "logging of everything": "import logging; logging.basicConfig(force=True, level=1)",
    "inspect": "import inspect; inspect.signature = inspect.getsource = inspect.currentframe = inspect.iscoroutine = None",
    "another start method": "import multiprocessing; multiprocessing.set_start_method('spawn', force=True)",
    "a finder that refuses": (
        "import sys\nclass Refuses:\n    def find_spec(self, *_): raise ImportError('no')\nsys.meta_path.insert(0, Refuses())"
    ),
    "traitlets": "import traitlets; traitlets.HasTraits.set_trait = traitlets.HasTraits.observe = None",
    "socket": (
        "import socket\ndef fail(*_, **__): raise OSError('no')\n"
        "socket.socket = socket.getaddrinfo = socket.gethostname = socket.create_connection = socket.socketpair = fail"
    ),
    "io and open": "import codecs, io; io.TextIOWrapper = io.FileIO = io.BytesIO = io.StringIO = io.open = codecs.open = None",
    "weakref": (
        "import weakref\nfor n in ('ref', 'KeyedRef', 'WeakKeyDictionary', 'WeakValueDictionary', 'WeakSet', 'proxy'): "
        "setattr(weakref, n, None)"
    ),
    "math": "import math\nfor n in [n for n in dir(math) if not n.startswith('__')]: setattr(math, n, None)",
    "selectors": (
        "import select, selectors\n"
        "for m in (selectors, selectors.EpollSelector, select):\n"
        "    for n in [n for n in dir(m) if not n.startswith('_')]: setattr(m, n, None)"
    ),
    "heapq and contextvars": "import contextvars, heapq\nfor n in heapq.__all__: setattr(heapq, n, None)\ncontextvars.copy_context = contextvars.Context = None",
    "os.path": (
        "import genericpath, posixpath\nfor m in (genericpath, posixpath):\n"
        "    for n in m.__all__: callable(getattr(m, n)) and setattr(m, n, None)"
    ),
    "os.stat": "import os; os.stat = os.lstat = os.fspath = os.fsencode = os.fsdecode = None",
    "contextlib and functools": (
        "import contextlib, functools\ncontextlib.suppress = contextlib.contextmanager = contextlib.ExitStack = None\n"
        "functools.partial = functools.wraps = functools.lru_cache = None"
    ),
}
INTERPRETER = {
    "no print": "import builtins; builtins.print = None",
    "no len": "import builtins; builtins.len = None",
    "no isinstance": "import builtins; builtins.isinstance = None",
    "no open": "import builtins; builtins.open = None",
    "len that equals everything": "import builtins, unittest.mock; builtins.len = unittest.mock.ANY",
    "len that cannot be compared": "import builtins\nclass E:\n    def __eq__(self, _): raise KeyboardInterrupt\nbuiltins.len = E()",
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
    "functions of sys": (
        "import sys\nfor n in ('_getframe', '_current_frames', 'getrecursionlimit', 'setrecursionlimit', 'gettrace', 'settrace', "
        "'getprofile', 'setprofile', 'getsizeof', 'intern', 'getswitchinterval', 'is_finalizing'): setattr(sys, n, None)"
    ),
    "another sys.modules": "import sys; sys.modules = {}",
    "no sys.modules": "import sys; sys.modules = None",
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
    "statistics of the collector": "import gc; gc.set_debug(gc.DEBUG_STATS); gc.collect(); gc.set_debug(0)",
    "no frames in tracebacks": "import sys; sys.tracebacklimit = 0",
    "a high recursion limit": "import sys; sys.setrecursionlimit(10**6)",
    "other exits": "import os, sys; sys.exit = os._exit = os.abort = print",
    "another __main__": "import sys, types; sys.modules['__main__'] = types.ModuleType('__main__')",
    "cleared globals": (
        "def clear(keep=('kept', 'begun', 'rank_', 'sleep_', 'barrier_', 'print_')):\n"
        "    kept_ = {n: globals()[n] for n in keep}; globals().clear(); globals().update(kept_)\nclear()"
    ),
    "the first hooks": "import sys; sys.excepthook, sys.displayhook = sys.__excepthook__, sys.__displayhook__",
    "no breakpointhook": "import sys; sys.breakpointhook = None",
    "an unraisablehook that fails": "import sys; sys.unraisablehook = lambda _: 1 / 0",
    "a trace function of threads that fails": "import threading\ndef fail(*_): raise ZeroDivisionError\nthreading.settrace(fail); threading.setprofile(fail)",
    "threads with small stacks": "import threading; threading.stack_size(32768)",
    "a Thread that does not start": "import threading; threading.Thread.start = threading.Thread.run = lambda self: None",
    "hooks of generators": "import sys; sys.set_asyncgen_hooks(None, None); sys.set_coroutine_origin_tracking_depth(5)",
    "an audit hook that refuses": (
        "import sys\ndef refuse(event, args):\n    if event in ('socket.connect', 'os.system', 'subprocess.Popen'): raise PermissionError(event)\n"
        "sys.addaudithook(refuse)"
    ),
}
IPYTHON = {
    "no ipython hooks": (
        "ip = get_ipython()\nfor n in ip.events.callbacks: ip.events.callbacks[n].clear()\n"
        "ip.input_transformers_post.clear(); ip.ast_transformers.clear(); ip.input_transformers_cleanup.clear()"
    ),
    "no history": "ip = get_ipython(); ip.history_manager.input_hist_raw.clear(); ip.history_manager.enabled = False; ip.execution_count = -5",
    "a showtraceback that fails": "def fail(*_, **__): raise RuntimeError('no')\nip = get_ipython(); ip.showtraceback = ip._showtraceback = fail",
    "no display formatter": "get_ipython().display_formatter = None",
    "no display": "ip = get_ipython(); ip.display_pub.publish = ip.displayhook.start_displayhook = None",
    "an exception handler that fails": "get_ipython().set_custom_exc((Exception, KeyboardInterrupt), lambda *_, **__: 1 / 0)",
    "a transformer of code that fails": "class Fails:\n    def visit(self, node): raise ZeroDivisionError\nget_ipython().ast_transformers.append(Fails())",
    "hooks that fail": (
        "def fail(*_): raise ZeroDivisionError\nip = get_ipython()\n"
        "for n in ('pre_execute', 'pre_run_cell', 'post_execute', 'post_run_cell'): ip.events.register(n, fail)"
    ),
    "no interactivity": "get_ipython().ast_node_interactivity = 'none'",
    "no kernel": "get_ipython().kernel = None",
    "a new namespace": (
        "def renew(ip, names): ip.reset(new_session=False); ip.push(names)\n"
        "renew(get_ipython(), dict(kept=kept, rank_=rank_, begun=begun, sleep_=sleep_, barrier_=barrier_, print_=print_))"
    ),
    "no events and history": "ip = get_ipython(); ip.events = None; ip.history_manager = None",
    "no compiler": "get_ipython().compile = None",
}
ENVIRONMENT = {
    "no environment": "import os; os.environ.clear()",
    "a working directory that is gone": "import os, tempfile\nd = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)",
    "nothing in /tmp": "import os, tempfile; tempfile.tempdir = '/nowhere'; os.environ['TMPDIR'] = '/nowhere'",
    "a umask": "import os; os.umask(0o777)",
    "a limit of file size": "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (0, -1)); signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
    "another process group": "import os\ntry: os.setpgid(0, 0)\nexcept OSError: pass",
    "locale": "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    "no functions of resource": "import resource; resource.getrlimit = resource.setrlimit = resource.getrusage = None",
    "low priority": "import os; os.nice(5)",
    "a limit of processor time": (
        "import resource, signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_CPU, (1, -1))"
    ),
    "few open files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (120, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
    "a small stack": "import resource; resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))",
    "the root folder": "import os; os.chdir('/')",
    "one core": "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    "another name and no signal of the parent": "import ctypes; libc = ctypes.CDLL(None); libc.prctl(15, b'other'); libc.prctl(1, 0)",
    "no environment in C": "import ctypes; ctypes.CDLL(None).clearenv()",
    "no variables of the group": "import os\nfor n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'LOCAL_WORLD_SIZE'): os.environ.pop(n, None)",
    "other variables of the group": "import os; os.environ.update(RANK='7', WORLD_SIZE='9', LOCAL_RANK='8', MASTER_ADDR='nowhere', MASTER_PORT='1')",
    "no descriptors for children": "import os\nfor n in range(3, 400):\n    try: os.set_inheritable(n, True)\n    except OSError: pass",
}
LOOPS = {
    "no event loop": "import asyncio; asyncio.set_event_loop(None)",
    "another event loop": "import asyncio; asyncio.set_event_loop(asyncio.new_event_loop())",
    "another policy": "import asyncio; asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())",
    "a stopped event loop": "import asyncio; asyncio.get_running_loop().stop()",
    "a closed event loop": "import asyncio\ntry: asyncio.get_running_loop().close()\nexcept RuntimeError: pass",
    "cancelled tasks": ("import asyncio\nfor task in asyncio.all_tasks(): task.cancel()"),
    "a loop inside the loop": (  # like nest_asyncio
        "import asyncio\nloop = asyncio.get_running_loop(); asyncio._set_running_loop(None)\n"
        "inner = asyncio.new_event_loop(); inner.run_until_complete(asyncio.sleep(0)); inner.close()\n"
        "asyncio._set_running_loop(loop)"
    ),
    "no running loop": "import asyncio; asyncio._set_running_loop(None)",
    "an exception handler of the loop": "import asyncio; asyncio.get_running_loop().set_exception_handler(lambda *_: 1 / 0)",
    "a handler of signals of the loop": "import asyncio, signal; asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)",
    "no readers": "import asyncio\nloop = asyncio.get_running_loop()\nfor n in range(1024): loop.remove_reader(n); loop.remove_writer(n)",
    "a loop without selector and queue": "import asyncio\nloop = asyncio.get_running_loop(); loop._selector = loop._ready = None",
    "a loop without methods": (
        "import asyncio\nloop = asyncio.get_running_loop()\n"
        "for n in ('call_soon', 'call_soon_threadsafe', '_run_once', 'time', '_process_events', '_add_reader'): setattr(loop, n, None)"
    ),
    "a loop without wakeup sockets": "import asyncio\nloop = asyncio.get_running_loop(); loop._ssock.close(); loop._csock.close()",
    "a closed selector": "import asyncio; asyncio.get_running_loop()._selector.close()",
    "a selector whose descriptor is closed": "import asyncio, os; os.close(asyncio.get_running_loop()._selector.fileno())",
    "a selector whose descriptor is another file": "import asyncio, os\nn = os.open(os.devnull, 0); os.dup2(n, asyncio.get_running_loop()._selector.fileno()); os.close(n)",
    "a debugged loop": "import asyncio; asyncio.get_running_loop().set_debug(True)",
    "a task factory that fails": "import asyncio; asyncio.get_running_loop().set_task_factory(lambda *_, **__: 1 / 0)",
    "no executor": "import asyncio\nloop = asyncio.get_running_loop(); loop.run_in_executor = loop.create_task = loop.call_later = loop.call_at = None",
    "a loop that stops later": "import asyncio; asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)",
    "a loop that another thread stops": "import asyncio; asyncio.get_running_loop().call_soon_threadsafe(asyncio.get_running_loop().stop)",
    "a callback that fails": "import asyncio; asyncio.get_running_loop().call_soon(lambda: 1 / 0)",
    "a callback that exits": "import asyncio, sys; asyncio.get_running_loop().call_soon(sys.exit)",
    "a stopped IOLoop of tornado": "from tornado.ioloop import IOLoop; IOLoop.current().stop()",
    "an IOLoop of tornado that stops later": "from tornado.ioloop import IOLoop; IOLoop.current().call_later(0, IOLoop.current().stop)",
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
    "many threads": "torch.set_num_threads(64)",
    "another seed": "torch.manual_seed(0); torch.default_generator.set_state(torch.get_rng_state())",
    "a function mode": (
        "from torch.overrides import TorchFunctionMode\nclass Mode(TorchFunctionMode):\n"
        "    def __torch_function__(self, func, types, args=(), kwargs=None): return func(*args, **(kwargs or {}))\nMode().__enter__()"
    ),
    "hooks of saved tensors": "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()",
    "save and load": "torch.save = torch.load = torch.nn.Module.__call__ = torch.nn.Module.state_dict = None",
    "a debug level": "dist.set_debug_level(dist.DebugLevel.DETAIL)",
    "a type in place of a tensor": "torch.set_default_tensor_type(torch.DoubleTensor)",
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
PROGRAMS = {f"{kind}: {name}": code for kind, programs in KINDS.items() for name, code in programs.items()} | FUNCTIONS
# These cells fail before they are stopped, because IPython cannot run the next statement.
FAIL = {
    "interpreter: no id and type",
    "interpreter: deleted builtins",
    "interpreter: a trace function that fails",
    "modules: no modules",
    "builtins: hasattr and getattr fail",
    "builtins: no code runs",
    "builtins: exec fails",
    "builtins: iterators fail",
    "builtins: text is bytes",
    "builtins: no errors",
    "builtins: imports return an object",
    "builtins: imports interrupt",
}
# These operations fail, as in a plain Python process: `barrier` of torch needs the replaced function, or `sum` is gone.
FAIL_WHILE = {
    ("interpreter: no len", "an operation"),
    ("interpreter: len that equals everything", "an operation"),
    ("interpreter: len that cannot be compared", "an operation"),
    ("interpreter: no isinstance", "an operation"),
    ("torch: torch functions", "an operation"),
    ("interpreter: another __builtins__", "a long call"),
}
# A group cannot be created without the functions that these programs have replaced.
FORM_NO_GROUP = {"torch: torch functions", "modules: os.path", "modules: os.stat"}
# `print` of these programs fails, as they want it to.
PRINT_NOTHING = {"builtins: print fails", "builtins: print interrupts"}
# The text of these programs is redirected, also in the next cell.
SILENT = {"streams: stdout in a file", "streams: streams in memory", "streams: a redirection that is left"}

_SET_UP = """
if "begun" not in globals():  # an earlier program may have replaced these functions
    def begun(name, _open=__import__("os").open, _close=__import__("os").close):
        _close(_open(name + str(rank_), 66))  # O_CREAT and O_RDWR
    import time
    sleep_, barrier_, print_ = time.sleep, dist.barrier, print
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


def reset_stop_and_go_on(session: Any, program: str, wait: str, directory: Path, *, forms_anew: bool = False) -> None:
    """Run the program, press stop while its cell waits, and check that the next cell works normally.

    Args:
        forms_anew: Also check that the group can be formed again.
    """
    session.run(_SET_UP)
    code = f"{PROGRAMS[program]}\nbegun({str(directory / 'begun-')!r})\n{WAITS[wait]}"
    fails = program in FAIL or (program, wait) in FAIL_WHILE
    ends_with = RankError if fails else KeyboardInterrupt
    with pytest.raises(ends_with):
        run_until_stopped(session, code, directory)
    count = 0 if program in SILENT else 1
    for _ in range(1 + forms_anew):
        code = AFTER.replace("print(", "print_(") if program in PRINT_NOTHING else AFTER
        after = session.run(code, timeout_s=30, quiet=True)
        # IPython may print text about hooks that fail before and after it
        assert [after[rank].stdout.count("text 2 10\n") for rank in after.ranks] == [count] * 2
        if forms_anew and program not in FORM_NO_GROUP:
            session.ranks.reform()


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
        session.run(code, timeout_s=40, quiet=True)
    finally:
        ended.set()
        presses.join()
