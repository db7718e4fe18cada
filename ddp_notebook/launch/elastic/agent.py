"""torchrun itself, with the script under `ddp_notebook.attach`: what `%ddp_torchrun` starts as agents.

With gloo and torch 2.13 a job does not get past a restart: the c10d rendezvous shares one store between all attempts,
whose keys it does not tell apart, so workers of a later attempt look for peers at addresses of the earlier one. torch
has a switch for that, which is set here unless the user has set it.

Source: https://github.com/pytorch/pytorch/issues/135712
"""

from __future__ import annotations

import os
import sys

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main() -> None:
    """Be an agent, to its end."""
    os.environ.setdefault(OWN_STORES, "1")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    args = torchrun.parse_args(sys.argv[1:])
    if args.no_python or args.run_path:
        option = "--no-python" if args.no_python else "--run-path"
        sys.exit(f"%ddp_torchrun runs a Python script or, with -m, a module in each rank: leave out {option}")
    script = [args.training_script, *args.training_script_args]
    args.training_script_args = ["-m", *script] if args.module else script
    args.training_script, args.module = "ddp_notebook.attach", True
    record(torchrun.run)(args)


if __name__ == "__main__":
    main()
