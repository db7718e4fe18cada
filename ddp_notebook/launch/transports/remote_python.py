"""The Python interpreter of a host: select one, and report missing packages.

Without `--python`, the path of the notebook's own interpreter is tried first, since hosts often share their file system
or have the same environments. If the host has no such file, or packages are missing in it, `python3` is used. An
interpreter with missing packages prints a line, and the next one is tried.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = str(Path(__file__).parents[3])  # import path of the package, if the hosts share their folders
# Modules that a host server and its ranks import, and the names of their distributions.
_NEEDED = {
    "torch": "torch",
    "ddp_notebook": "ddp_notebook",
    **{name: name for name in ("cloudpickle", "ipykernel", "ipyparallel", "numpy", "psutil", "threadpoolctl")},
    **{"IPython": "ipython", "traitlets": "traitlets", "zmq": "pyzmq"},
}
_MARK = "ddp_notebook lacks"
_LACKS = re.compile(rf"^{_MARK} (?P<modules>[\w,]+) in Python (?P<version>[\d.]+) (?P<python>.*)$", re.MULTILINE)
# The code uses the standard library only, since packages may be missing. Its arguments are the interpreters to try
# next. It has no single quotes and backslashes, which shells treat differently.
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
    """Return the shell command that runs the function `main` of a module on a host.

    Args:
        python: the interpreter on the host; None: the path of this one if it exists and has all packages, else python3.
        module: of this package.
    """
    code = _CODE.format(root=json.dumps(ROOT), needed=" ".join(_NEEDED), mark=_MARK, module=module)
    code = f"exec({code!r})"  # one line, which all shells can pass on
    if python is not None:
        return f"exec {_quoted(python)} -P -c {shlex.quote(code)}"
    ours = shlex.quote(sys.executable)
    rest = f"-P -c {shlex.quote(code)}"
    script = f"if [ -x {ours} ]; then exec {ours} {rest} python3; fi; exec python3 {rest}"
    return f"exec sh -c {shlex.quote(script)}"


def lacking(words: str) -> str:
    """Return a sentence about missing packages of the host's interpreters; "" if none is missing.

    Args:
        words: their standard error.

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
    if not needed or "ddp_notebook" in modules:  # installing ddp_notebook installs the others
        return " and ".join(packages)
    names = " and ".join(filter(None, [", ".join(needed[:-1]), needed[-1]]))
    return ", and ".join([*packages, f"no {names}, which ddp_notebook needs"])


def _quoted(path: str) -> str:
    """Quote a path for the remote shell, which still expands a leading ~."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)
