# mypy: ignore-errors
# ruff: noqa: F401
"""Record outcomes, names, numbers and profiles of `torch.distributed.rpc` as text.

`test_observed.py` runs this file and `cases.py` in plain processes and in a cell, and compares what `observe` returns.
"""

import re
import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.autograd import profiler
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.futures import Future


def good(x):
    return x + 1


def bad():
    raise ValueError("bad value")


class TwoArguments(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)


def bad_class():
    raise TwoArguments(3, "two")


def slow(seconds=0.6):
    time.sleep(seconds)
    return "slow"


def lock():
    return threading.Lock()


def reference_of(x):
    return rpc.RRef(x)


def nested(to, x):
    return rpc.rpc_sync(to, good, args=(x,))


def nested_reference(to, x):
    return rpc.remote(to, good, args=(x,))


def fetch(reference, timeout):
    return reference.to_here(timeout=timeout)


def no_function_of_torch(x):
    return type(x).__name__


def exits():
    raise SystemExit(3)


def in_a_thread(set_it):
    future = Future()
    threading.Timer(0.05, set_it, (future,)).start()
    return future


@rpc.functions.async_execution
def later(x):
    return in_a_thread(lambda future: future.set_result(x + 1))


@rpc.functions.async_execution
def later_bad():
    return in_a_thread(lambda future: future.set_exception(ValueError("bad value")))


@rpc.functions.async_execution
def later_lock():
    return in_a_thread(lambda future: future.set_result(threading.Lock()))


@rpc.functions.async_execution
def later_raises():
    raise ValueError("bad value")


@rpc.functions.async_execution
def later_then_raises():
    def raises(future):
        raise ValueError("bad value")

    return in_a_thread(lambda future: future.set_result(1)).then(raises)


@rpc.functions.async_execution
def later_none():
    return None


@rpc.functions.async_execution
def later_tensor():
    return torch.ones(2)


@rpc.functions.async_execution
def later_reference(x):
    return in_a_thread(lambda future: future.set_result(rpc.RRef(x)))


@rpc.functions.async_execution
def later_remote(to, x):
    return rpc.rpc_async(to, good, args=(x,))


@rpc.functions.async_execution
def never():
    return Future()


held = {}


@rpc.functions.async_execution
def hold(key):
    return held.setdefault(key, Future())


def let_go(key, value):
    held.setdefault(key, Future()).set_result(value)


class Held:
    def __init__(self, x=0):
        self.x = x

    def good(self, x):
        return self.x + x

    def bad(self):
        raise ValueError("bad value")

    def slow(self, seconds=0.6):
        time.sleep(seconds)

    def lock(self):
        return threading.Lock()

    @rpc.functions.async_execution
    def later(self, x):
        return in_a_thread(lambda future: future.set_result(self.x + x))

    @rpc.functions.async_execution
    def tensor(self):
        return torch.ones(2)

    @rpc.functions.async_execution
    def never(self):
        return Future()

    @staticmethod
    @rpc.functions.async_execution
    def static_later(x):
        return in_a_thread(lambda future: future.set_result(x + 1))

    @staticmethod
    @rpc.functions.async_execution
    def static_tensor():
        return torch.ones(2)

    @classmethod
    @rpc.functions.async_execution
    def class_later(cls, x):
        return in_a_thread(lambda future: future.set_result(x + 1))

    @classmethod
    @rpc.functions.async_execution
    def class_none(cls):
        return None


def made_badly():
    raise ValueError("bad value")


@torch.jit.script
def script(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


@torch.jit.script
def script_raises(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        raise ValueError("bad value")
    return x


@rpc.functions.async_execution
@torch.jit.script
def script_later(to: str, x: torch.Tensor, y: torch.Tensor) -> Future[torch.Tensor]:
    return rpc.rpc_async(to, script, (x, y))


@torch.jit.script
def gradients_of(context: int, x: torch.Tensor) -> torch.Tensor:
    return dist_autograd.get_gradients(context)[x]


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("bad value")


def bad_backward(x):
    return BadBackward.apply(x)


def double(x):
    return 2 * x


class Bad(nn.Module):
    def forward(self, x):
        raise ValueError("bad value")


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(1.0)
        return x


def my_gradient(context, x):
    return dist_autograd.get_gradients(context)[x.local_value()]


def this_context():
    return dist_autograd._current_context()._context_id()


one, two = torch.ones(2), torch.ones(3)


class Late(Held):
    def __init__(self):
        super().__init__(1)
        time.sleep(1.0)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def total(x):
    return (2 * x).sum()


def parameter():
    return torch.ones(2, requires_grad=True)


def use(reference):
    return 3 * reference.local_value()


def context_there():
    with dist_autograd.context() as context:
        return context >> 48


def wait_for(reference, seconds):
    time.sleep(seconds)
    return reference


def backward():
    with dist_autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        dist_autograd.backward(context, [(3 * rpc.rpc_sync("worker1", double, args=(x,))).sum()])


def hooked():
    """Return the state of autocast in a hook of a backward that was called with autocast."""
    with dist_autograd.context() as context, torch.autocast("cpu"):
        x, found = torch.ones(2, requires_grad=True), []
        y = rpc.rpc_sync("worker1", double, args=(x,))
        y.register_hook(lambda _: found.append(torch.is_autocast_enabled("cpu")))
        dist_autograd.backward(context, [y.sum()])
    return found


def without_races(names):
    """Remove operators whose recording depends on the timing of threads.

    Accumulating a gradient may copy it, and the caller's thread reads an answer that arrives early.
    """
    return [name for name in names if not re.search(r"detach|copy|empty|aten::(to|as_strided|set_)", name)]


def keys(run, of=lambda event: event.key, **options):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profiler.profile(**options) as profile:
            run()
    return sorted({str(of(event)) for event in profile.function_events})


_here = {}


def attempt(code):
    """Return the outcome of code as text: its value or its error."""
    *before, last = code.rstrip().split("\n")
    if last.startswith((" ", "with ")) or (last.startswith("rpc._set")):
        before, last = [*before, last], "None"
    began = time.monotonic()
    try:
        exec("\n".join(before), globals() | _here, _here)
        value = eval(last, globals() | _here)
        outcome = re.sub(r"0x[0-9a-f]+", "N", str(value))
    except BaseException as error:
        outcome = f"{type(error).__name__}: {_plain(str(error))}"
    took = time.monotonic() - began
    return outcome if took < 8 else f"{outcome} (after {took:.0f} s)"


_WHERE = re.compile(r"^(  |Traceback)|(^|: )On [^:]*:$")


def _plain(text):
    """Return the lines of an error that describe it, without location, and without parts that differ between runs."""
    for pattern, plain in _OURS:
        text = re.sub(pattern, plain, text)
    lines = [line for line in text.splitlines() if line.strip() and not _WHERE.search(line)]
    line = re.sub(r"0x[0-9a-f]+|\d+ ms|request #\d+|local_id=\d+", "N", lines[0] if lines else "")
    return re.sub(r"^Exception raised from.*", "", line)


# Messages of the package that differ from those of torch.
_OURS = [
    (r"On (?:WorkerInfo\(id=\d+, name=(\w+)\)|(\w+) \(rank \d+\)):", r"On \1\2:"),
    (r"PicklingError: the result of the call, a \w+, cannot be sent: (.*); call rpc.remote .*", r"TypeError: \1"),
    (r"SystemExit\(3\)", "SystemExit: 3"),
    (r"RuntimeError\('\w+(?:\.\w+)* is decorated with async_execution.* but returned (\w+)'\)", r"got torch.\1"),
    (r'\("On \w+:\s+(got torch\.\w+)\n[^"]*"\)', r'("\1")'),  # the same, reported by a third worker
    (r"Unable to cast Python instance .* must return a torch.futures.Future object, but (got [\w.]+)", r"\1"),
]


def observe(rank, cases):
    """Return the outcome of each case on rank 0; the other rank serves."""
    _here.update(me=f"worker{rank}", to=f"worker{1 - rank}")
    if rank:
        return {}
    found = {}
    for name, code in cases.items():
        _here["reference"] = rpc.remote(_here["to"], Held, args=(1,))
        before = rpc.get_rpc_timeout()
        found[name] = attempt(code)
        rpc._set_rpc_timeout(before)
    return found
