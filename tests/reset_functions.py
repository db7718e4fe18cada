"""Programs that replace functions of the standard library by some that raise or return nonsense, for `tests/resets`."""

# ruff: noqa: E501  # programs as one line are easier to compare

from __future__ import annotations

_FAIL = "def fail(*_, **__): raise OSError('no')\n"


def _each(modules: str, names: str, value: str = "fail") -> str:
    """Return a program that sets these names of modules or classes, as far as they exist."""
    found = "".join(f"    hasattr(of_, {name!r}) and setattr(of_, {name!r}, {value})\n" for name in names.split())
    imported = ", ".join(dict.fromkeys(one.partition(".")[0] for one in modules.split()))
    return f"import {imported}\n{_FAIL}for of_ in ({modules.replace(' ', ', ')},):\n{found}"


_METHODS = "send sendall recv recv_into accept connect bind listen close detach fileno setblocking settimeout shutdown"
SOCKETS = {
    "sockets are numbers": "import socket; socket.socket = socket.SocketType = lambda *_, **__: 7",
    "methods of sockets fail": _each("socket.socket", _METHODS),
    "methods of sockets return None": _each("socket.socket", _METHODS, "lambda *_, **__: None"),
    "no address is found": "import socket; socket.getaddrinfo = lambda *_, **__: []; socket.gethostname = socket.getfqdn = lambda *_: None",
    "no constants of socket": _each("socket", "AF_INET AF_INET6 AF_UNIX SOCK_STREAM SOL_SOCKET SO_PEERCRED", "None"),
    "a short timeout of all sockets": "import socket; socket.setdefaulttimeout(0.001)",
    "sockets that do not block": "import socket; socket.setdefaulttimeout(0.0)",
    "names in _socket": _each("_socket", "socket getaddrinfo gethostname socketpair close inet_pton inet_aton"),
    "ssl": "import ssl; ssl.SSLContext = ssl.create_default_context = ssl.wrap_socket = None",
}
SELECT = {
    "select and poll fail": _each("select", "select poll epoll"),
    "poll returns an object": "import select; select.poll = select.epoll = lambda *_, **__: object()",
    "nothing is ever ready": "import select; select.select = lambda *_: ([], [], [])",
    "everything is ready": "import select; select.select = lambda r, w, x, *_: (r, w, x)",
    "selectors fail": _each(
        "selectors.EpollSelector selectors.PollSelector selectors.SelectSelector",
        "select register unregister close get_map modify",
    ),
    "selectors return nothing": _each("selectors.EpollSelector", "select", "lambda *_, **__: []"),
}
TIME = {
    "a sleep that fails": _each("time", "sleep"),
    "a sleep that interrupts": "import time\ndef stop(_): raise KeyboardInterrupt\ntime.sleep = stop",
    "a sleep that does not end": "import threading, time; time.sleep = lambda _, wait=threading.Event().wait: wait()",
    "clocks without numbers": _each(
        "time", "time monotonic perf_counter time_ns monotonic_ns process_time thread_time", "lambda: 'noon'"
    ),
    "clocks that jump": "import itertools, time\nfor n in ('time', 'monotonic', 'perf_counter'):\n    setattr(time, n, lambda c=itertools.cycle((1e18, -1.0, 0.0)): next(c))",
    "dates fail": _each("time", "localtime gmtime strftime strptime mktime ctime asctime tzset"),
}
OS = {
    "reads return nothing": "import os; os.read = os.pread = lambda *_: b''",
    "reads would block": "import os\ndef blocks(*_): raise BlockingIOError(11, 'no')\nos.read = os.readv = os.pread = blocks",
    "writes are lost": "import os; os.write = os.pwrite = lambda fd, data, *_: len(data)",
    "writes are short": "import os; real_ = os.write; os.write = lambda fd, data: real_(fd, data[:1])",
    "descriptors of files fail": _each(
        "os",
        "open close dup dup2 pipe pipe2 fstat isatty set_blocking get_blocking set_inheritable memfd_create eventfd",
    ),
    "open files are -1": "import os; os.open = os.dup = lambda *_, **__: -1; os.pipe = lambda: (-1, -1)",
    "processes fail": _each("os", "fork kill killpg getpid getppid getpgid setsid waitpid waitid wait posix_spawn"),
    "this process is process 1": "import os; os.getpid = os.getppid = lambda: 1",
    "signals are lost": "import os; os.kill = os.killpg = lambda *_: None",
    "no process can be forked": "import os\ndef no_fork(*_): raise MemoryError\nos.fork = os.forkpty = no_fork",
    "no environment object": "import os; os.environ = os.environb = None; os.getenv = lambda *_: None",
    "an environment of a dictionary": "import os; os.environ = {}",
    "an environment that fails": "import os\nclass Env(dict):\n    def __getitem__(self, _): raise OSError\n    get = __contains__ = __iter__ = __len__ = keys = items = copy = __getitem__\nos.environ = Env()",
    "folders fail": _each(
        "os",
        "listdir scandir mkdir makedirs rmdir unlink remove rename replace getcwd chdir walk access stat lstat readlink",
    ),
    "nothing is random": "import os, secrets, uuid; os.urandom = os.getrandom = lambda n, *_: bytes(n); secrets.token_bytes = secrets.token_hex = lambda *_: ''; uuid.uuid4 = lambda: 0",
    "no random bytes": "import os; os.urandom = os.getrandom = lambda *_: b''",
    "no cores": "import os; os.cpu_count = lambda: None; os.sched_getaffinity = lambda _: set()",
    "another system": "import os, platform, sys; os.name, os.sep, os.linesep, sys.platform, os.devnull = 'nt', '\\\\', '\\r\\n', 'win32', 'NUL'; platform.system = lambda: 'Windows'",
    "no os.path": "import os; os.path = None",
    "names in posix": _each(
        "posix", "read write open close getpid kill fork waitpid fstat stat pipe dup2 getcwd listdir"
    ),
    "sizes of a terminal fail": _each("os shutil", "get_terminal_size"),
}
THREADS = {
    "locks are None": "import threading; threading.Lock = threading.RLock = threading.Semaphore = lambda *_: None",
    "locks fail": _each("threading", "Lock RLock Condition Semaphore BoundedSemaphore Barrier Event"),
    "locks that never lock": "import threading\nclass Lock:\n    def acquire(self, *_, **__): return True\n    def release(self): pass\n    def locked(self): return False\n    __enter__, __exit__ = acquire, lambda *_: None\nthreading.Lock = threading.RLock = Lock",
    "methods of events fail": _each("threading.Event", "wait set clear is_set"),
    "methods of events return None": _each("threading.Event", "wait set clear is_set", "lambda *_, **__: None"),
    "methods of conditions fail": _each(
        "threading.Condition", "wait wait_for notify notify_all acquire release __enter__ __exit__"
    ),
    "methods of threads fail": _each("threading.Thread", "start join is_alive run getName _bootstrap"),
    "no thread is current": "import threading; threading.current_thread = threading.main_thread = lambda: None",
    "threads of another program": "import threading; threading.get_ident = threading.get_native_id = lambda: 0; threading.enumerate = lambda: []",
    "no active threads": "import threading; threading._active.clear(); threading._limbo.clear()",
    "the end of threads": "import threading; threading._main_thread = None; threading.local = None",
    "names in _thread": _each(
        "_thread", "allocate_lock start_new_thread get_ident get_native_id RLock lock interrupt_main stack_size"
    ),
    "queues fail": _each("queue queue.Queue", "get put get_nowait put_nowait empty SimpleQueue Queue Empty Full"),
    "futures fail": _each(
        "concurrent.futures.Future", "result set_result exception set_exception add_done_callback done cancel"
    ).replace("import concurrent", "import concurrent.futures"),
}
BUILTINS = {
    "open fails": f"import builtins\n{_FAIL}builtins.open = fail",
    "open returns an object": "import builtins; builtins.open = lambda *_, **__: object()",
    "open returns other text": "import builtins, io; builtins.open = lambda *_, **__: io.StringIO('other')",
    "print fails": f"import builtins\n{_FAIL}builtins.print = fail",
    "print interrupts": "import builtins\ndef stop(*_, **__): raise KeyboardInterrupt\nbuiltins.print = stop",
    "input exits": "import builtins\ndef leave(*_): raise SystemExit(3)\nbuiltins.input = leave",
    "isinstance fails": f"import builtins\n{_FAIL}builtins.isinstance = builtins.issubclass = fail",
    "everything is an instance": "import builtins; builtins.isinstance = builtins.issubclass = lambda *_: True",
    "hasattr and getattr fail": f"import builtins\n{_FAIL}builtins.hasattr = builtins.getattr = builtins.setattr = fail",
    "no code runs": "import builtins; builtins.exec = builtins.eval = builtins.compile = lambda *_, **__: None",
    "exec fails": f"import builtins\n{_FAIL}builtins.exec = builtins.eval = builtins.compile = fail",
    "no classes": "import builtins; builtins.__build_class__ = builtins.super = builtins.property = builtins.object = None",
    "iterators fail": f"import builtins\n{_FAIL}builtins.iter = builtins.next = builtins.enumerate = builtins.zip = builtins.map = builtins.filter = builtins.range = fail",
    "containers are others": "import builtins; builtins.dict, builtins.list, builtins.set, builtins.tuple = list, dict, tuple, set",
    "text is bytes": "import builtins; builtins.str, builtins.bytes = bytes, str",
    "no errors": "import builtins\nfor n in ('OSError', 'ValueError', 'KeyError', 'TypeError', 'RuntimeError', 'StopIteration', 'AttributeError', 'ImportError'): setattr(builtins, n, None)",
    "errors that are others": "import builtins; builtins.Exception = builtins.OSError = builtins.KeyError = builtins.BlockingIOError = KeyboardInterrupt",
    "imports return an object": "import builtins; builtins.__import__ = lambda *_, **__: object()",
    "imports interrupt": "import builtins\ndef stop(*_, **__): raise KeyboardInterrupt\nbuiltins.__import__ = stop",
    "imports take long": "import builtins, time; real_import_, nap_ = __import__, time.sleep\ndef slow(*a, **k): nap_(0.001); return real_import_(*a, **k)\nbuiltins.__import__ = slow",
    "min, max, sum and abs": "import builtins; builtins.min = builtins.max = builtins.sum = builtins.abs = builtins.round = lambda *_, **__: 10**9",
    "sorting fails": f"import builtins\n{_FAIL}builtins.sorted = builtins.reversed = builtins.any = builtins.all = fail",
    "names of objects fail": f"import builtins\n{_FAIL}builtins.repr = builtins.ascii = builtins.format = builtins.hash = builtins.id = builtins.callable = fail",
    "namespaces are others": "import builtins; builtins.globals = builtins.locals = builtins.vars = builtins.dir = lambda *_: {}",
}
OTHERS = {
    "fcntl, termios and mmap": "import fcntl, mmap, termios; fcntl.fcntl = fcntl.ioctl = fcntl.flock = mmap.mmap = termios.FIONREAD = None",
    "ctypes": "import ctypes; ctypes.CDLL = ctypes.cdll = ctypes.create_string_buffer = ctypes.c_int = ctypes.byref = None",
    "subprocess": "import subprocess; subprocess.Popen = subprocess.run = subprocess.PIPE = None",
    "tempfile and shutil": "import shutil, tempfile; tempfile.mkdtemp = tempfile.gettempdir = tempfile.NamedTemporaryFile = shutil.rmtree = shutil.copy = None",
    "hashlib and hmac": "import hashlib, hmac; hmac.new = hmac.digest = hmac.compare_digest = hashlib.sha256 = hashlib.blake2b = hashlib.md5 = hashlib.new = None",
    "base64, zlib and binascii": "import base64, binascii, zlib; base64.b64encode = base64.b64decode = zlib.crc32 = zlib.compress = binascii.hexlify = None",
    "dataclasses and enum": "import dataclasses, enum; dataclasses.fields = dataclasses.replace = dataclasses.asdict = dataclasses.dataclass = enum.Enum = None",
    "re": "import re; re.compile = re.match = re.search = re.sub = re.fullmatch = None; re.purge()",
    "copy and copyreg": "import copy, copyreg; copy.copy = copy.deepcopy = copyreg.__reduce_ex__ = None; copyreg.dispatch_table.clear()",
    "ast, tokenize and codeop": "import ast, codeop, tokenize; ast.parse = ast.NodeVisitor = ast.walk = tokenize.generate_tokens = codeop.Compile = None",
    "linecache": "import linecache; linecache.cache.clear(); linecache.getlines = linecache.getline = linecache.updatecache = linecache.checkcache = None",
    "types, typing and abc": "import abc, types, typing; types.ModuleType = types.FunctionType = types.SimpleNamespace = typing.cast = abc.ABCMeta = None",
    "importlib": "import importlib; importlib.import_module = importlib.reload = importlib.util = importlib.machinery = None",
    "atexit and faulthandler": "import atexit, faulthandler\nfor m in (atexit, faulthandler):\n    for n in [n for n in dir(m) if not n.startswith('_')]: setattr(m, n, None)",
    "gc": "import gc\nfor n in ('collect', 'enable', 'disable', 'isenabled', 'get_objects', 'get_referrers', 'freeze', 'get_count'): setattr(gc, n, None)",
    "errno and stat": "import errno, stat\nfor m in (errno, stat):\n    for n in [n for n in dir(m) if n.isupper() or n.startswith(('S_', 'E'))]: setattr(m, n, -7)",
    "multiprocessing": "import multiprocessing; multiprocessing.Process = multiprocessing.current_process = multiprocessing.Queue = None",
    "platform and sysconfig": "import platform, sysconfig; platform.node = platform.python_version = platform.uname = sysconfig.get_path = None",
    "numbers of Python": "import sys\nsys.maxsize, sys.byteorder, sys.executable, sys.version_info, sys.argv, sys.prefix = 3, 'none', None, (2, 7), None, '/nowhere'",
}
KINDS = {
    "sockets": SOCKETS,
    "select": SELECT,
    "time": TIME,
    "os": OS,
    "threads": THREADS,
    "builtins": BUILTINS,
    "others": OTHERS,
}
FUNCTIONS = {f"{kind}: {name}": code for kind, programs in KINDS.items() for name, code in programs.items()}
