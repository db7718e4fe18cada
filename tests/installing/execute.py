"""Run a notebook as a separate program: `python execute.py in.ipynb out.ipynb [PYTHON]`.

Imports nothing of this repository, so that an environment without it can run this. PYTHON is the interpreter of the
kernel, by default the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

source, executed, python = (*sys.argv[1:], sys.executable)[:3]
notebook = nbformat.read(source, as_version=4)
manager = AsyncKernelManager(kernel_name="python3")
assert manager.kernel_spec is not None
manager.kernel_spec.argv[0] = python
client = NotebookClient(notebook, manager, timeout=300, resources={"metadata": {"path": str(Path(executed).parent)}})
try:
    client.execute()
finally:
    nbformat.write(notebook, executed)
