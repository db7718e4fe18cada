"""torchrun itself, as `%ddp_torchrun` starts it.

With gloo and torch 2.13 a job does not get past a restart: the c10d rendezvous shares one store between all attempts,
whose keys it does not tell apart, so workers of a later attempt look for peers at addresses of the earlier one. torch
has a switch for that, which is set here unless the user has set it.

Source: https://github.com/pytorch/pytorch/issues/135712
"""

from __future__ import annotations

import os
import sys

from ddp_notebook.launch.elastic import rendezvous

_ATTACH = "ddp_notebook.attach"  # the module under which the script runs

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main() -> None:
    """Be an agent, to its end. Arguments are those of `torchrun`."""
    os.environ.setdefault(OWN_STORES, "1")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    rendezvous.register()
    try:
        torchrun.main(sys.argv[1:])
    except SignalException as error:  # somebody has pressed stop: not the place for a traceback of torchrun's
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:  # its traceback has only frames of torchrun and of this file
        print(ChildFailedError(_script(sys.argv, error.name), error.failures), file=sys.stderr)
        sys.exit(1)


def _script(arguments: list[str], name: str) -> str:
    """Return the script or module that the ranks run; `name` if it does not run under `ddp_notebook.attach`.

    Example:
        >>> _script(["agent", "-m", "ddp_notebook.attach", "train.py", "--lr", "0.1"], "ddp_notebook.attach")
        'train.py'
    """
    if name != _ATTACH or _ATTACH not in arguments:
        return name
    program = arguments[arguments.index(_ATTACH) + 1 :]
    return next((word for word in program if word != "-m"), name)


if __name__ == "__main__":
    main()
