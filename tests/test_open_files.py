"""The limit of open files of a process: it is raised where possible, and the error names it otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddp_notebook.errors import UsageError
from ddp_notebook.launch.host import open_files

LIMITED = """
import resource
import ddp_notebook
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 260))
try:
    ddp_notebook.start(2)
except ddp_notebook.UsageError as error:
    print(error)
with ddp_notebook.start(1) as session:
    limits = "import resource; resource.getrlimit(resource.RLIMIT_NOFILE)"
    print(session.run(limits, quiet=True)[0].result, resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.long
def test_the_open_file_limit_is_raised_up_to_the_hard_limit():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused, allowed = done.stdout.splitlines()
    assert refused.startswith(
        "2 ranks need 264 open files per process, but the limit on this machine is 260: start at most 1"
    )
    assert "ulimit -n 264" in refused
    assert allowed == "(260, 260) (260, 260)"


def test_another_host_is_named():
    with pytest.raises(
        UsageError, match="8 ranks need 288 open files per process, but the limit on gpu2 is 64: start at most 0"
    ):
        open_files.check(8, 64, "gpu2")
    open_files.check(8, 288, "gpu2")
