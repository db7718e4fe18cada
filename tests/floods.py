"""Cells that flood a front end in many ways, and a timed press of the stop button."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.kernels import NotebookKernel

_WIDGET = "import ipywidgets as widgets\nfrom IPython.display import display\n"
_COMM = "from comm import create_comm\nc = create_comm(target_name='flood')\n"
# Endless code by name. `GO` is right before the loop.
FLOODS = {
    "widget values": _WIDGET
    + """w = widgets.IntProgress(max=10**9); display(w)
GO
i = 0
while True: w.value = i; i += 1
""",
    "values of many widgets": _WIDGET
    + """ws = [widgets.IntProgress(max=10**9) for _ in range(50)]; display(widgets.VBox(ws))
GO
i = 0
while True: ws[i % 50].value = i; i += 1
""",
    "tqdm.notebook": """from tqdm.notebook import trange
GO
for i in trange(10**9, mininterval=0): pass
""",
    "tqdm.auto": """from tqdm.auto import tqdm
GO
for i in tqdm(range(10**9), mininterval=0): pass
""",
    "tqdm in text": """from tqdm import trange
GO
for i in trange(10**9, mininterval=0): pass
""",
    "clear_output": """from IPython.display import clear_output
GO
i = 0
while True: clear_output(wait=True); print(i); i += 1
""",
    "clear_output without wait": """from IPython.display import clear_output
GO
i = 0
while True: clear_output(); print(i); i += 1
""",
    "Output widget, captured": _WIDGET
    + """out = widgets.Output(); display(out)
GO
i = 0
while True:
    with out: print(i)
    i += 1
""",
    "Output widget, appended": _WIDGET
    + """out = widgets.Output(); display(out)
GO
i = 0
while True: out.append_stdout(f'{i}\\n'); i += 1
""",
    "Output widget, cleared": _WIDGET
    + """out = widgets.Output(); display(out)
GO
i = 0
while True:
    with out: out.clear_output(wait=True); print(i)
    i += 1
""",
    "updates of a display": """from IPython.display import display
handle = display('start', display_id=True)
GO
i = 0
while True: handle.update(i); i += 1
""",
    "displays": """from IPython.display import HTML, display
GO
i = 0
while True: display(HTML(f'<b>{i}</b>')); i += 1
""",
    "displays of text": """from IPython.display import display
GO
i = 0
while True: display(i); i += 1
""",
    "large HTML": """from IPython.display import HTML, display
page = '<b>word</b> ' * 100_000
GO
while True: display(HTML(page))
""",
    "updates with large HTML": """from IPython.display import HTML, display
page = '<b>word</b> ' * 100_000
handle = display(HTML(page), display_id=True)
GO
i = 0
while True: handle.update(HTML(page + str(i))); i += 1
""",
    "images": """import os
from IPython.display import Image, display
png = bytes.fromhex('89504e470d0a1a0a') + os.urandom(1_000_000)
GO
while True: display(Image(png, format='png'))
""",
    "custom messages": _COMM
    + """GO
i = 0
while True: c.send({'n': i}); i += 1
""",
    "large custom messages": _COMM
    + """text = 'word ' * 40_000
GO
while True: c.send({'text': text})
""",
    "huge custom messages": _COMM
    + """text = 'word ' * 400_000
GO
while True: c.send({'text': text})
""",
    "custom messages with buffers": _COMM
    + """import os
data = os.urandom(100_000)
GO
while True: c.send({'n': 1}, buffers=[data])
""",
    "widget with buffers": _WIDGET
    + """import os
datas = [os.urandom(100_000) for _ in range(8)]
w = widgets.Image(value=datas[0]); display(w)
GO
i = 0
while True: w.value = datas[i % 8]; i += 1
""",
    "widgets opened and closed": _WIDGET
    + """GO
while True: widgets.IntText().close()
""",
    "figures": """import matplotlib
matplotlib.use('module://matplotlib_inline.backend_inline')
import matplotlib.pyplot as plt
GO
while True: plt.plot([1, 2, 3]); plt.show()
""",
    "rich progress": """from rich.progress import track
GO
for i in track(range(10**9), update_period=0.001): pass
""",
    "logging": """import logging
logger = logging.getLogger('flood'); logger.addHandler(logging.StreamHandler()); logger.setLevel('INFO')
GO
i = 0
while True: logger.info('step %d', i); i += 1
""",
    "prints": """GO
i = 0
while True: print(i); i += 1
""",
    "long prints": """GO
line = 'x' * 100_000
while True: print(line)
""",
    "prints without newline": """GO
while True: print('.', end='')
""",
    "prints without newline, flushed": """GO
while True: print('.', end='', flush=True)
""",
    "carriage returns": """GO
i = 0
while True: print(f'\\r{i}', end='', flush=True); i += 1
""",
    "stderr": """import sys
GO
i = 0
while True: print(i, file=sys.stderr); i += 1
""",
    "C output": """import ctypes
libc = ctypes.CDLL(None)
GO
i = 0
while True: libc.printf(b'line of C\\n'); i += 1
""",
    "os.write": """import os
GO
while True: os.write(1, b'x' * 60 + b'\\n')
""",
    "threads": """import threading, time
ends = threading.Event()
def talk(n):
    i = 0
    while not ends.is_set(): print(n, i); i += 1
threads = [threading.Thread(target=talk, args=(n,), daemon=True) for n in range(4)]
GO
[t.start() for t in threads]
try:
    while True: time.sleep(1)
finally:
    ends.set()
""",
    "threads with widgets": _WIDGET
    + """import threading, time
ends = threading.Event()
ws = [widgets.IntProgress(max=10**9) for _ in range(4)]
display(widgets.VBox(ws))
def talk(w):
    i = 0
    while not ends.is_set(): w.value = i; i += 1
threads = [threading.Thread(target=talk, args=(w,), daemon=True) for w in ws]
GO
[t.start() for t in threads]
try:
    while True: time.sleep(1)
finally:
    ends.set()
""",
    "forked children": """import os, signal, sys
def talk():
    i = 0
    while True: print(os.getpid(), i); i += 1
GO
sys.stdout.flush()
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        try: talk()
        finally: os._exit(0)
    children.append(pid)
try:
    while True: os.waitpid(-1, 0)
finally:
    for pid in children: os.kill(pid, signal.SIGKILL)
    for pid in children: os.waitpid(pid, 0)
""",
    "a subprocess": """import subprocess
GO
subprocess.run(['yes'])
""",
    "nested bars": """from tqdm.notebook import tqdm
GO
for i in tqdm(range(10**9), mininterval=0):
    for j in tqdm(range(20), mininterval=0, leave=False): pass
""",
    "updates of a display from threads": """import threading, time
from IPython.display import display
ends = threading.Event()
handles = [display('start', display_id=True) for _ in range(4)]
def talk(handle):
    i = 0
    while not ends.is_set(): handle.update(i); i += 1
threads = [threading.Thread(target=talk, args=(handle,), daemon=True) for handle in handles]
GO
[t.start() for t in threads]
try:
    while True: time.sleep(1)
finally:
    ends.set()
""",
    "HTML of 20 MB": """from IPython.display import HTML, display
page = '<b>word</b> ' * 1_700_000
GO
while True: display(HTML(page))
""",
    "audio": """import numpy
from IPython.display import Audio, display
sound = numpy.random.rand(200_000)
GO
while True: display(Audio(sound, rate=22_050))
""",
    "cursor moves": """GO
i = 0
while True: print(f'\\x1b[1A\\x1b[2K{i}'); i += 1
""",
    "colours": """GO
i = 0
while True: print(f'\\x1b[3{i % 8}mword {i}\\x1b[0m'); i += 1
""",
    "os.write to stderr": """import os
GO
while True: os.write(2, b'x' * 200 + b'\\n')
""",
    "os.write without newline": """import os
GO
while True: os.write(1, b'x' * 4096)
""",
    "rich live table": """from rich.live import Live
from rich.table import Table
GO
i = 0
with Live(refresh_per_second=1000) as live:
    while True:
        table = Table('step', 'value'); table.add_row(str(i), str(i)); live.update(table, refresh=True); i += 1
""",
    "subprocesses": """import subprocess
GO
while True: subprocess.run(['seq', '20000'])
""",
    "logging from threads": """import logging, threading, time
logger = logging.getLogger('flood'); logger.addHandler(logging.StreamHandler()); logger.setLevel('INFO')
ends = threading.Event()
def talk(n):
    while not ends.is_set(): logger.info('thread %d', n)
threads = [threading.Thread(target=talk, args=(n,), daemon=True) for n in range(4)]
GO
[t.start() for t in threads]
try:
    while True: time.sleep(1)
finally:
    ends.set()
""",
    "text and widgets": _WIDGET
    + """w = widgets.IntProgress(max=10**9); display(w)
GO
i = 0
while True: w.value = i; print(i); display(i); i += 1
""",
    "text and custom messages": _COMM
    + """GO
i = 0
while True: c.send({'n': i}); print(i); i += 1
""",
    "displays and widgets, awaited": _WIDGET
    + """import asyncio
w = widgets.IntProgress(max=10**9); display(w)
GO
i = 0
while True: w.value = i; display(i); i += 1; await asyncio.sleep(0)
""",
    "warnings": """import warnings
GO
i = 0
while True: warnings.warn(f'bad {i}'); i += 1
""",
    "values of one metric": """GO
i = 0
while True: log(loss=i); i += 1
""",
    "a new metric each time": """GO
i = 0
while True: log(**{f'x{i}': i}); i += 1
""",
    "many figures updated": """import matplotlib
matplotlib.use('module://matplotlib_inline.backend_inline')
import matplotlib.pyplot as plt
from IPython.display import clear_output
GO
while True: clear_output(wait=True); plt.plot([1, 2, 3]); plt.show()
""",
}


def code_of(name: str, begun: Path, magic: str = "%%on_all_ranks") -> str:
    """Return the cell with a flood, which creates the file `begun` right before it."""
    return f"{magic}\n" + FLOODS[name].replace("GO\n", f"open({str(begun)!r}, 'w').close()\n", 1)


@dataclass
class Memory:
    """Peak resident memory of the kernel and all processes below it, sampled in a thread."""

    pid: int
    most_mib: dict[int, float] = field(default_factory=dict)
    first_mib: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> Memory:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        root = psutil.Process(self.pid)
        seen = [root, *root.children(recursive=True)]
        while not self._ends.wait(0.2):
            for one in seen:
                try:
                    mib = one.memory_info().rss / 2**20
                except psutil.Error:
                    continue
                self.first_mib.setdefault(one.pid, mib)
                self.most_mib[one.pid] = max(self.most_mib.get(one.pid, 0.0), mib)

    def grown_mib(self) -> float:
        """Return the growth of the process that has grown most."""
        return max((most - self.first_mib[pid] for pid, most in self.most_mib.items()), default=0.0)


@dataclass
class Ended:
    """The end of a cell: a monotonic time, its error, and the number of messages."""

    at_s: float
    ename: str
    evalue: str
    messages: int


def run_raw(
    kernel: NotebookKernel, code: str, each: Callable[[], bool] = lambda: True, timeout_s: float = 60.0
) -> Ended:
    """Run a cell to its end. Messages are not parsed, because the speed of a front end is not measured.

    Args:
        each: Called at least every 20 ms. Messages are not read while it returns False.
    """
    client, socket, count = kernel.client, kernel.client.iopub_channel.socket, 0
    asked = client.execute(code)
    message_id, until = asked.encode(), time.monotonic() + timeout_s
    while True:
        assert time.monotonic() < until, f"not ended after {count} messages: {code}"
        if not each():
            time.sleep(0.02)
            continue
        if not socket.poll(20):
            continue
        frames = socket.recv_multipart()
        count += 1
        body = frames[frames.index(b"<IDS|MSG>") + 2 :]
        if b'"idle"' in body[3] and message_id in body[1]:
            break
    ended_s = time.monotonic()
    while True:
        answer = client.get_shell_msg(timeout=10)
        if answer["parent_header"].get("msg_id") == asked:
            content: dict[str, Any] = answer["content"]
            return Ended(ended_s, content.get("ename", ""), content.get("evalue", ""), count)


@dataclass
class Stopped:
    """The end of a cell after one press."""

    took_s: float
    ename: str
    evalue: str
    messages: int
    grown_mib: float


def stop(kernel: NotebookKernel, code: str, begun: Path, after_s: float = 2.0, silent_s: float = 0.0) -> Stopped:
    """Run a flooding cell, press stop once, and measure the time until the prompt is back.

    Args:
        begun: File that the cell creates first.
        after_s: Time before the press.
        silent_s: The front end reads no messages for this time before the press.
    """
    begun.unlink(missing_ok=True)
    press_at, pressed_s = float("inf"), 0.0

    def each() -> bool:
        nonlocal press_at, pressed_s
        now = time.monotonic()
        if press_at == float("inf") and begun.exists():
            press_at = now + after_s + silent_s
        if now > press_at and not pressed_s:
            kernel.interrupt()
            pressed_s = time.monotonic()
        return bool(pressed_s) or now < press_at - silent_s

    with Memory(kernel.pid) as memory:
        ended = run_raw(kernel, code, each)
    return Stopped(ended.at_s - pressed_s, ended.ename, ended.evalue, ended.messages, memory.grown_mib())
