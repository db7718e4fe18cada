"""`python -m ddp_notebook`: kept sessions from a shell, see `launch.keep.shell`."""

from __future__ import annotations

import sys

from ddp_notebook.launch.keep.shell import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
