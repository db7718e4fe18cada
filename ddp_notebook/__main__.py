"""`python -m ddp_notebook`: what notebooks can attach to, from a shell; see `shell`."""

from __future__ import annotations

import sys

from ddp_notebook.shell import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
