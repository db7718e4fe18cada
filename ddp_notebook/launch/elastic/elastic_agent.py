"""torchrun itself, as `%ddp_torchrun` starts it.

With gloo and torch 2.13 a job fails after a restart. All attempts share one store of the c10d rendezvous, with the same
keys. So workers of a later attempt connect to addresses of the earlier one. torch has a switch against this, which is
set here unless the user has set it.

Source: https://github.com/pytorch/pytorch/issues/135712
"""

from __future__ import annotations

import os
import sys

from ddp_notebook.launch.elastic import rendezvous

_ATTACH = "ddp_notebook.attach"  # the module that runs the script

OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main() -> None:
    """Run an agent to its end, with the arguments of `torchrun`."""
    os.environ.setdefault(OWN_STORES, "1")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    rendezvous.register()
    try:
        torchrun.main(sys.argv[1:])
    except SignalException as error:  # the stop button was pressed: omit the traceback of torchrun
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
