"""The Python interpreter that a host runs: which one is taken, and what it lacks.

Without `--python` the path of the notebook's own interpreter is tried first, since hosts often share their file system
or have the same environments. If the host has no such file, or what ranks need is not installed for it, `python3` is
taken. An interpreter that lacks something says so in a line, and the next one is tried.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).parents[3])  # the import path of the package, if the hosts share their folders
# Modules that a host server and its ranks import, and the names of their distributions.
_NEEDED = {
    "torch": "torch",
    "ddp_notebook": "ddp_notebook",
    **{name: name for name in ("cloudpickle", "ipykernel", "ipyparallel", "numpy", "psutil", "threadpoolctl")},
    **{"IPython": "ipython", "traitlets": "traitlets", "zmq": "pyzmq"},
}
_MARK = "ddp_notebook lacks"
_LACKS = re.compile(rf"^{_MARK} (?P<modules>[\w,]+) in Python (?P<version>[\d.]+) (?P<python>.*)$", re.MULTILINE)
# It uses the standard library only, since no package may be there. Its arguments are the interpreters to try next.
# Without single quotes and backslashes, which shells treat differently.
_CODE = """import sys
sys.path.append({root})
from importlib.util import find_spec
lacks = [name for name in "{needed}".split() if find_spec(name) is None]
if lacks:
    import os
    version = ".".join(map(str, sys.version_info[:3]))
    print("{mark}", ",".join(lacks), "in Python", version, sys.executable, file=sys.stderr, flush=True)
    for python in sys.argv[1:]:
        try:
            os.execvp(python, [python, "-P", "-c", sys.orig_argv[3]])
        except OSError:
            pass
    sys.exit(1)
from {module} import main
main()
"""


def command(python: str | None, module: str) -> str:
    """Return the command by which a host's shell runs the function `main` of a module.

    Args:
        python: the interpreter there; None: the path of this one if that is there and lacks nothing, else python3.
        module: of this package.
    """
    code = _CODE.format(root=json.dumps(ROOT), needed=" ".join(_NEEDED), mark=_MARK, module=module)
    code = f"exec({code!r})"  # in one line, which all shells can pass on
    if python is not None:
        return f"exec {_quoted(python)} -P -c {shlex.quote(code)}"
    ours = shlex.quote(sys.executable)
    rest = f"-P -c {shlex.quote(code)}"
    script = f"if [ -x {ours} ]; then exec {ours} {rest} python3; fi; exec python3 {rest}"
    return f"exec sh -c {shlex.quote(script)}"


def lacking(words: str) -> str:
    """Return a sentence about the packages that interpreters of a host lack; "" if none has reported any.

    Args:
        words: what they wrote to standard error.

    Example:
        >>> lacking("ddp_notebook lacks torch,psutil,zmq in Python 3.11.7 /usr/bin/python3")
        '/usr/bin/python3 (Python 3.11.7) has no torch, and no psutil and pyzmq, which ddp_notebook needs'
        >>> lacking("ddp_notebook lacks torch,ddp_notebook,zmq in Python 3.11.7 /usr/bin/python3")
        '/usr/bin/python3 (Python 3.11.7) has no torch and no ddp_notebook'
    """
    sentences = [
        f"{found['python']} (Python {found['version']}) has {_in_words(found['modules'].split(','))}"
        for found in _LACKS.finditer(words)
    ]
    return "; ".join(dict.fromkeys(sentences))


def _in_words(modules: Sequence[str]) -> str:
    packages = [f"no {name}" for name in ("torch", "ddp_notebook") if name in modules]
    needed = sorted(_NEEDED[name] for name in modules if name not in ("torch", "ddp_notebook"))
    if not needed or "ddp_notebook" in modules:  # which brings them
        return " and ".join(packages)
    names = " and ".join(filter(None, [", ".join(needed[:-1]), needed[-1]]))
    return ", and ".join([*packages, f"no {names}, which ddp_notebook needs"])


def _quoted(path: str) -> str:
    """Quote a path for the remote shell, which still expands a leading ~."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
