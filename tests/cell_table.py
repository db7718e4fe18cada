"""Table of cells and their expected output, run with every transport that can start ranks.

`{all}` stands for the label of all ranks, `{n}` for their number. A string must match exactly, a pattern is searched
for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Expected = str | re.Pattern[str] | None


@dataclass(frozen=True)
class Case:
    """A cell for all ranks, and the expected output in the notebook."""

    name: str
    code: str
    stdout: Expected = ""
    stderr: Expected = ""
    error: str = ""  # pattern of the traceback; "": no error
    mimes: tuple[str, ...] = field(default=())  # MIME types of the displays, each shown once for all ranks
    prefix: str = "%%on_all_ranks\n"


def has(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL | re.MULTILINE)


TABLE = [
    # ---- text
    Case("print", "print('hello')", "{all} hello\n"),
    Case("print of each rank", "if rank < 2: print('rank', rank)", "[0-1] rank 0 | 1\n"),
    Case("stderr", "import sys; print('oops', file=sys.stderr)", stderr="{all} oops\n"),
    Case("no end of line", "print('a', end='')", "{all} a\n"),
    Case("parts of a line", "print('a', end=' '); print('b')", "{all} a b\n"),
    Case("unicode", "print('é ∇ 🙂')", "{all} é ∇ 🙂\n"),
    Case("markup is text", "print('<b>bold</b> &amp;')", "{all} <b>bold</b> &amp;\n"),
    Case("a bar that is redrawn", "print('1%\\r50%\\r100%')", "{all} 100%\n"),
    Case("text from C", "import ctypes; n = ctypes.CDLL(None).puts(b'from C')", "{all} from C\n"),
    Case("os.write", "import os; x = os.write(1, b'raw\\n')", "{all} raw\n"),
    Case("logging", "import logging; logging.warning('careful')", stderr="{all} WARNING:root:careful\n"),
    Case(
        "a warning",
        "\nimport warnings\nwarnings.warn('mind')",
        stderr=has(r"^\{all\} \S+:3: UserWarning: mind\n\{all\}   warnings.warn\('mind'\)\n$"),
    ),
    Case("an empty cell", "# nothing"),
    Case("pass", "pass"),
    # ---- values
    Case("the last expression", "1 + 1", "{all} 2\n"),
    Case("no value after a semicolon", "1 + 1;"),
    Case("_", "_ + 40", "{all} 42\n"),
    Case("a value of several lines", "torch.eye(2)", "{all} tensor([[1., 0.],\n{pad}        [0., 1.]])\n"),
    Case("a value of each rank", "rank if rank < 2 else None", "[0] 0\n[1] 1\n"),
    Case("Out keeps no tensor", "torch.ones(3), [v for v in Out.values() if 'tensor' in str(v)]", has(r"\[\]\)\n$")),
    Case("display", "display('shown')", "{all} 'shown'\n"),
    Case(
        "HTML",
        "from IPython.display import HTML; HTML('<i>x</i>')",
        "{all}\n",
        mimes=("text/html",),
    ),
    Case(
        "a figure",
        "%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);",
        "{all}\n",
        mimes=("image/png",),
    ),
    Case(
        "a handle that is updated",
        "from IPython.display import display, Markdown\n"
        "h = display(Markdown('a'), display_id=True) if rank == 0 else None\n"
        "if h: h.update(Markdown('b'))",
        "[0]\n",
        mimes=("text/markdown",),
    ),
    Case(
        "clear_output",
        "from IPython.display import clear_output\n"
        "for i in range(3):\n    clear_output(wait=True)\n    print('step', i)",
        "{all} step 2\n",
    ),
    # ---- the group
    Case("a collective", "x = torch.ones(1); dist.all_reduce(x); int(x)", "{all} {n}\n"),
    Case(
        "names of the rank",
        "assert 0 <= local_rank == rank < world_size == dist.get_world_size(); device.type",
        "{all} 'cpu'\n",
    ),
    Case(
        "a subgroup",
        "g = dist.new_group([0, 1]); x = torch.ones(1)\nif rank < 2: dist.all_reduce(x, group=g); print(int(x))",
        "[0-1] 2\n",
    ),
    Case(
        "a class of a cell from rank to rank",
        "class Point:\n    def __init__(self, x): self.x = x\n"
        "box = [Point(7) if rank == 0 else None]\ndist.broadcast_object_list(box, src=0)\nbox[0].x",
        "{all} 7\n",
    ),
    Case(
        "a function of a cell, pickled",
        "import pickle\ndef double(x): return 2 * x\npickle.loads(pickle.dumps(double))(21)",
        "{all} 42\n",
    ),
    Case(
        "rank in a loop",
        "for rank in range(world_size + 1): pass",
        stderr="{all} ddp_notebook: this cell has set rank, but each cell starts with the rank's own value; "
        "use another name to keep one\n",
    ),
    Case("and rank is right again", "assert rank == dist.get_rank(); len({rank, local_rank})", "{all} 1\n"),
    Case(
        "deleted names",
        "del rank, torch, dist",
        stderr="{all} ddp_notebook: this cell has deleted rank and torch and dist, but each cell starts with the "
        "rank's own value\n",
    ),
    Case("and all are back", "torch.ones(1).item() * dist.get_world_size() > rank >= 0", "{all} True\n"),
    # ---- IPython
    Case("await", "import asyncio\nawait asyncio.sleep(0.01)\nprint('slept')", "{all} slept\n"),
    Case("await of tasks", "sum(await asyncio.gather(*[asyncio.sleep(0, i) for i in range(4)]))", "{all} 6\n"),
    Case("!echo", "!echo from the shell", "{all} from the shell\n"),
    Case("!-lines into a variable", "lines = !echo one two\nlines[0]", "{all} 'one two'\n"),
    Case("%%bash", "%%bash\necho from bash", "{all} from bash\n"),
    Case("%%bash fails", "%%bash\nexit 3", error="CalledProcessError"),
    Case("%timeit", "%timeit -n1 -r1 pass", has(r"per loop")),
    Case("%%time", "%%time\nprint('timed')", has(r"\{all\} timed\n.*Wall time")),
    Case("%%capture", "%%capture kept\nprint('quiet')"),
    Case("what %%capture kept", "kept.stdout", "{all} 'quiet\\n'\n"),
    Case("%autoreload", "%reload_ext autoreload\n%autoreload 2"),
    Case("%env", "%env DDP_TABLE=1", "{all} env: DDP_TABLE=1\n"),
    Case("%who_ls", "names = %who_ls\n'double' in names", "{all} True\n"),
    Case("help", "len?", has(r"Return the number of items in a container")),
    Case("%%writefile", "%%writefile /dev/null\nx", "{all} Overwriting /dev/null\n"),
    Case("an unknown magic", "%nosuchmagic", error="Line magic function `%nosuchmagic` not found"),
    # ---- errors
    Case(
        "an error",
        "def f():\n    raise ValueError('no')\nf()",
        error=r"--- ranks 0-\d ---.*line 3.*line 2.*ValueError: no",
    ),
    Case(
        "a message that UTF-8 cannot encode",
        "raise OSError('a\\ud800')",
        error=r"--- ranks 0-\d ---.*OSError: a\\ud800",
    ),
    Case(
        "a value that UTF-8 cannot encode",
        "class B:\n    def __repr__(self): return 'b\\ud800'\nB()",
        "{all} b\\ud800\n",
    ),
    Case("an error of one rank", "if rank == 1: 1 / 0", error=r"--- rank 1 ---.*ZeroDivisionError.*succeeded: rank"),
    Case("lines before the code count", "\n \n\nx = 1\n1 / 0", error=r"Cell In\[\d+\], line 5\n.*---> 5 1 / 0"),
    Case("also for a syntax error", "\n\nfor", error=r"Cell In\[\d+\], line 3\n.*SyntaxError: .* \(line 3\)"),
    Case("and in a magic", "%%time\n\nx = 1\n1 / 0", error=r"File <timed exec>:3"),
    Case("a command of two lines counts as two", "!true a \\\n  b\nx = !true \\\n  c\n1 / 0", error="---> 5 1 / 0"),
    Case("a syntax error", "for", error=r"--- ranks 0-\d ---.*SyntaxError"),
    Case("exit()", "exit()", error=r"exit\(\) and quit\(\) do not end a rank"),
    Case("sys.exit", "import sys; sys.exit(3)", error=r"SystemExit: 3: sys.exit\(\) does not end a rank"),
    Case("a debugger that opens by itself", "%pdb on", error="this debugger cannot run on a rank"),
    Case("one of Python", "import pdb; pdb.run('x = 1')", error="this debugger cannot run on a rank"),
    Case(
        "a doctest, whose runner is derived from it",
        "import builtins, doctest\n"
        "examples = doctest.DocTestParser().get_doctest('>>> 1 + 1\\n3', {}, 'examples', None, 0)\n"
        "failed = doctest.DocTestRunner().run(examples).failed\n"
        "del builtins._  # of Python's displayhook, which leaves IPython without its own\n"
        "failed",
        has("Expected:.*3.*Got:.*2.*1\n$"),
    ),
    Case("KeyboardInterrupt of its own", "raise KeyboardInterrupt", error="KeyboardInterrupt"),
    Case(
        "a failed cell keeps nothing",
        "import weakref\n"
        "def leak():\n"
        "    global seen\n    big = torch.ones(1000)\n    seen = weakref.ref(big)\n    raise MemoryError\n"
        "leak()",
        error="MemoryError",
    ),
    Case("and the memory is back", "seen() is None", "{all} True\n"),
    Case(
        "a handler of its own",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
        has("Handlers|Runner|on_sigint"),
    ),
    Case("a handler is put back", "signal.getsignal(signal.SIGINT).__name__", "{all} '_on_sigint'\n"),
    Case(
        "a signal that is blocked",
        "x = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})",
    ),
    Case("is unblocked", "{2, 15} & {int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())}", "{all} set()\n"),
    Case(
        "argparse",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', required=True)\n"
        "parser.parse_args()",
        error=r"SystemExit: 2\na rank has no command line: set sys.argv = \['train.py', ",
    ),
    *(
        Case(f"%%{name} on a rank", f"%%{name}\n1", error=rf"RuntimeError: %%{name} runs in the notebook")
        for name in ("on_all_ranks", "on_ranks", "local")
    ),
    # ---- processes and threads
    Case(
        "a thread",
        "import threading\nt = threading.Thread(target=print, args=('threaded',)); t.start(); t.join()",
        "{all} threaded\n",
    ),
    Case("a subprocess", "import subprocess; subprocess.run(['echo', 'sub']).returncode", "{all} sub\n{all} 0\n"),
    Case(
        "a forked child",
        "import os\npid = os.fork()\nif pid == 0:\n    print('child', flush=True); os._exit(0)\nos.waitpid(pid, 0)[1]",
        "{all} child\n{all} 0\n",
    ),
    Case(
        "a child that comes back",
        "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent') if pid else None",
        has(r"parent"),
    ),
    Case(
        "workers of a DataLoader",
        "from torch.utils.data import DataLoader\n"
        "sum(int(batch.sum()) for batch in DataLoader(torch.arange(8), batch_size=2, num_workers=2))",
        "{all} 28\n",
    ),
    Case(
        "a pool of processes",
        "from concurrent.futures import ProcessPoolExecutor\n"
        "with ProcessPoolExecutor(2) as pool: print(list(pool.map(double, range(3))))",
        "{all} [0, 2, 4]\n",
    ),
    Case(
        "multiprocessing by spawn of a module's function",
        "import multiprocessing as mp, operator\n"
        "with mp.get_context('spawn').Pool(1) as pool: print(pool.apply(operator.add, (1, 2)))",
        "{all} 3\n",
    ),
    Case("torch.compile", "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item()", "{all} 2.0\n"),
    Case(
        "autograd",
        "x = torch.ones(2, requires_grad=True); (x * x).sum().backward(); x.grad",
        "{all} tensor([2., 2.])\n",
    ),
    Case("a flood is whole below 5 MB", "for i in range(2000): print(i)", has(r"^\{all\} 0\n.*\{all\} 1999\n$")),
    # ---- sending
    Case("some ranks", "print('some')", "[1] some\n", prefix="%%on_ranks 1\n"),
    Case("a range of ranks", "print('some')", "[0-1] some\n", prefix="%%on_all_ranks --ranks 0-1\n"),
    Case("quiet", "print('not seen')", prefix="%%on_all_ranks --quiet\n"),
    Case("a line", "", "{all} {n}\n", prefix="%on_all_ranks world_size"),
    Case("here too", "print('both')", "{all} both\nboth\n", prefix="%%on_all_ranks --here\n"),
    Case("no such rank", "1", error="rank 9 does not exist; the ranks are 0 to", prefix="%%on_ranks 9\n"),
    Case(
        "a timeout",
        "import time\ntime.sleep(60)",
        error=r"longer than 0.5 s and was stopped.*ranks? \d.*: at cell line 2",
        prefix="%%on_all_ranks --timeout 0.5\n",
    ),
    Case("and on it goes", "x = torch.ones(1); dist.all_reduce(x); int(x)", "{all} {n}\n"),
]
