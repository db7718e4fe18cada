"""torch's test files of FSDP, tensor parallel, DTensor and DDP, which are not in its wheel, on ranks with CPUs.

The body of a test runs on existing ranks: bare ones, which are forked for it, or those of a session. Tests that require
GPUs run on CPUs if possible, and the default group is the existing one. `python -m tests.libraries.torchs_files FILE
RANKS` runs a whole file on bare ranks and prints the results as JSON.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.libraries.bare_ranks import on_bare_ranks

PASSED, SKIPPED = "passed", "skipped"
_WAITS_S = 15  # timeout of a group
_ONE_PROCESS = ("LocalTensor", "LocalDTensor", "fake")  # classes that simulate several ranks in one process


def load(path: str) -> ModuleType:
    """Load one of torch's test files as a module that requires no GPUs."""
    _let_through()
    file = Path(path)
    for folder in (_root(file), file.parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location(f"torchs_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _root(file: Path) -> Path:
    """Return the folder `test/distributed`, whose modules import each other by name."""
    return next(folder for folder in file.parents if folder.name == "distributed")


@functools.cache
def _let_through() -> None:
    """Make torch's decorators that require GPUs accept CPUs, and its groups be the existing one."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal import common_device_type, common_distributed, common_fsdp

    def always(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    for name in ("skip_if_lt_x_gpu", "at_least_x_gpu", "requires_accelerator_dist_backend", "requires_world_size"):
        if hasattr(common_distributed, name):
            setattr(common_distributed, name, (lambda n: True) if name == "at_least_x_gpu" else always)
    common_distributed.skip_if_no_gpu = lambda test: test
    common_fsdp.DEVICE_COUNT = 4  # the number of ranks for FSDP's test classes
    for_devices = common_device_type.instantiate_device_type_tests
    common_device_type.instantiate_device_type_tests = functools.partial(_for_cpus, for_devices)
    make: Any = DistributedDataParallel.__init__

    @functools.wraps(make)
    def on_cpus(model: Any, *args: Any, **named: Any) -> None:
        make(model, *args, **{key: value for key, value in named.items() if key not in ("device_ids", "output_device")})

    DistributedDataParallel.__init__ = on_cpus  # type: ignore[assignment, method-assign]

    c10d = dist.distributed_c10d
    init, destroy = c10d.init_process_group, c10d.destroy_process_group

    def init_process_group(*args: Any, **named: Any) -> None:
        backend = str(args[0] if args else named.get("backend") or "gloo")
        if dist.is_initialized() and backend not in ("gloo", "cpu:gloo"):
            raise unittest.SkipTest(f"a group of {backend}")
        if not dist.is_initialized():
            init(*args, **named)

    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    for holder in (dist, c10d):
        holder.init_process_group = init_process_group  # type: ignore[attr-defined]
        holder.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def _for_cpus(make: Callable[..., None], case: type, scope: Any, except_for: Any = None, **_: Any) -> None:
    make(case, scope, only_for=("cpu",))


def names(module: ModuleType) -> Iterator[str]:
    """Yield `Class.test` of the tests that use a process or a thread for each rank."""
    from torch.testing._internal.common_distributed import (
        MultiProcContinuousTest,
        MultiProcessTestCase,
        MultiThreadedTestCase,
    )

    bases = (MultiProcessTestCase, MultiProcContinuousTest, MultiThreadedTestCase)
    for key, case in vars(module).items():
        if not (isinstance(case, type) and issubclass(case, bases) and case.__module__ == module.__name__):
            continue
        if not any(word in base.__name__ for base in case.__mro__ for word in _ONE_PROCESS):
            yield from (f"{key}.{test}" for test in dir(case) if test.startswith("test"))


def run(module: ModuleType, name: str, rank: int, world_size: int, directory: str) -> str:
    """Run a test on this rank, which is in the default group.

    Args:
        module: Result of `load`.
        name: One of `names`.
        directory: Directory for the rendezvous of the ranks; empty, and the same on all ranks.

    Returns:
        How it has ended: `PASSED`, `SKIPPED` with a reason, or the error.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    key, method = name.split(".")
    given = getattr(module, key)
    # Modified in place, because test classes call `super` with their own names. A rank is one number in one process.
    given.world_size, given.rank, given.pg = world_size, rank, torch.distributed.group.WORLD
    given.file_name = given.rdvz_file = os.path.join(directory, "group")
    os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK=str(rank))
    torch._dynamo.reset()
    common_utils.set_rng_seed()
    test = given(method)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # DTensor has no rule for the default kernel on CPUs
            getattr(test, method)()
    except unittest.SkipTest as skip:
        return f"{SKIPPED}: {skip}"
    except SystemExit as end:
        return f"{SKIPPED}: {skips[end.code]}" if end.code in skips else f"exit {end.code}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {said[0][:200]} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
    finally:
        torch._dynamo.reset()
        torch.set_default_dtype(torch.float32)
    return PASSED


class Looks(logging.Handler):
    """Collects faults of this package that it has only logged.

    Also collects its messages about optimizers that are local variables of a test function and not of a cell.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[str] = []
        log = logging.getLogger("ddp_notebook")
        log.setLevel(logging.INFO)
        log.addHandler(self)
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._look)

    def _look(self, optimizer: Any, *_: Any) -> None:
        from ddp_notebook.rank.sharding.mistakes import of_optimizers

        frame = sys._getframe(1)
        while frame is not None and "/distributed/" not in frame.f_code.co_filename:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and any(value is optimizer for value in frame.f_locals.values()):
            self.seen += of_optimizers(frame.f_locals)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.WARNING:
            why = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self.seen.append(f"{record.getMessage()} {why}")


def _run_in(module: ModuleType, name: str, world_size: int, directory: str, rank: int) -> str:
    return run(module, name, rank, world_size, directory)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    tests = load(sys.argv[1])
    ranks = int(sys.argv[2])
    ended = {}
    for each in names(tests):
        with tempfile.TemporaryDirectory() as directory:
            one = functools.partial(_run_in, tests, each, ranks, directory)
            ended[each] = on_bare_ranks(one, ranks, Path(directory), _WAITS_S)
    print(json.dumps(ended))
