"""Reports of torch and Python about a program, as one line of JSON. Runs as a script and as a cell."""

import gc
import io
import json
import logging
import os
import pickle
import sys
import tempfile
import threading
import warnings
from collections import Counter

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

if not dist.is_initialized():
    dist.init_process_group("gloo")
me, group = dist.get_rank(), dist.new_group([0, 1])
shown = {}


def communicate():
    x, out = torch.ones(4), torch.empty(4)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True, group=group).wait()
    dist.all_reduce(torch.ones(1000))
    dist.all_reduce(torch.ones(8, dtype=torch.bfloat16))
    dist.all_reduce(torch.ones(8, dtype=torch.complex64))
    dist.broadcast(x, 0)
    dist.barrier()
    dist.all_gather([torch.empty(4), torch.empty(4)], x)
    dist.all_gather_object([None, None], "a" * (me + 1))
    dist.all_to_all_single(out, x)
    sent = dist.isend(x, 1 - me)
    dist.recv(out, 1 - me)
    sent.wait()
    functional.all_reduce(x, "sum", group).add(1)


def make(**options):
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    return DistributedDataParallel(layers, bucket_cap_mb=0.00005, **options)


def train(model, after_step=lambda: None):
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.utils.data.DataLoader([torch.ones(4)] * 8, batch_size=2):
        sgd.zero_grad()
        model(x).sum().backward()
        sgd.step()
        after_step()


# ---- profiles, traces and modes


def of_profile(result):
    """Return how often each operator ran, and its allocated memory. Both are the same in every run."""
    return {
        one.key: [one.count, one.self_cpu_memory_usage if one.key.startswith("aten::empty") else 0]
        for one in result.key_averages()
        if not one.key.startswith("[memory]")
    }


model = make()
communicate()  # initialisation, done only once
train(model)
for name, all_threads in (("profile", False), ("profile of all threads", True)):
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    for what, work in (("collectives", communicate), ("training", lambda: train(model))):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=options) as result:
            work()
        shown[f"{name}: {what}"] = of_profile(result)
with torch.autograd.profiler.profile(record_shapes=True) as result:
    communicate()
shown["autograd's profile"] = of_profile(result)

with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, "trace.json")
    observer = ExecutionTraceObserver().register_callback(path)
    observer.start()
    communicate()
    train(model)
    observer.stop()
    observer.unregister_callback()
    with open(path) as file:
        nodes = Counter(node["name"] for node in json.load(file)["nodes"])
shown["execution trace"] = {name: [count, 0] for name, count in nodes.items() if "thread" not in name}


class Functions(TorchFunctionMode):
    counts = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.counts[str(getattr(function, "__self__", None) or function.__name__)] += 1
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


for mode in (Functions(), Operators()):
    with mode:
        communicate()
        train(model)
    shown[f"mode: {type(mode).__name__}"] = {
        name: count for name, count in mode.counts.items() if " object at " not in name
    }

# ---- statistics and hooks


def statistics(model):
    """Return the statistics of DDP. For times, return only whether they exist."""
    facts = model._get_ddp_logging_data()
    places = ("gloo_socket_ifname", "master_addr", "master_port")  # from the environment
    return {name: bool(fact) if "time" in name else fact for name, fact in facts.items() if name not in places}


for name, options in (("DDP", {}), ("DDP with a static graph", {"static_graph": True})):
    steps, counted = [], make(**options)
    train(counted, lambda counted=counted, steps=steps: steps.append(statistics(counted)))
    shown[f"statistics: {name}"] = steps

hooked = make()
hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
train(hooked)
shown["statistics: a comm hook"] = statistics(hooked)
shown["hooks"] = {
    "the user's": hooked._comm_hooks == [(default_hooks.fp16_compress_hook, None)],
    "of all modules": {name: len(vars(modules)[name] or ()) for name in vars(modules) if name.startswith("_global_")},
    "of parameters": sorted(str(one._post_accumulate_grad_hooks) for one in model.parameters()),
    "of Python": [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile(), gc.callbacks],
}

# ---- groups

first, second = dist.new_group([0, 1]), dist.new_group([0, 1], group_desc="second")
dist.destroy_process_group(first)
shown["groups"] = {
    "names": list(distributed_c10d._world.pg_names.values()),
    "descriptions": [dist.group.WORLD.group_desc, group.group_desc, second.group_desc],
    "counts": [dist.get_pg_count(), distributed_c10d._world.group_count],
    "backends": [dist.get_backend_config(), str(dist.group.WORLD._device_types)],
    "timeouts": [str(one._get_backend(torch.device("cpu")).options._timeout) for one in (dist.group.WORLD, group)],
    "level": str(dist.get_debug_level()),
    "registered work": _distributed_c10d._get_work_registry_size(),
}
for name, read in (("_dump_fr_trace", pickle.loads), ("_dump_fr_trace_json", json.loads)):
    traces = read(getattr(_distributed_c10d, name)())
    shown[f"flight recorder: {name}"] = [
        [entry["profiling_name"], list(entry["process_group"]), entry["collective_seq_id"]]
        for entry in traces["entries"]
    ] + [
        # not the last completed one, which the thread of gloo may set later
        [str(status[f"last_{what}_collective"]) for what in ("enqueued", "started")]
        for status in traces["pg_status"].values()
    ]

# ---- warnings and logging

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    communicate()
    train(make())
shown["warnings"] = [str(one.message) for one in caught]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    DistributedDataParallel(torch.nn.Linear(1, 1), check_reduction=True)
own = make.__code__.co_filename
shown["lines of warnings"] = [one.filename == own and "check_reduction" in str(one.message) for one in caught]
shown["filters of warnings"] = sum("torch" in str(one) for one in warnings.filters)

stream = io.StringIO()
shown["logging before"] = [
    [type(one).__name__ for one in logging.root.handlers],
    logging.root.level,
    {
        name: one.level
        for name, one in logging.root.manager.loggerDict.items()
        if getattr(one, "level", 0) and "." in name
    },
]
logging.basicConfig(stream=stream, level=logging.DEBUG, format="%(name)s %(levelname)s %(message)s")
logging.getLogger("mine").debug("hello")
communicate()
train(make())
short_lived = dist.new_group([0, 1])
dist.barrier()  # a rank that destroys it while the other one is still connecting would make the other one fail
dist.destroy_process_group(short_lived)
for handler in logging.root.handlers[:]:
    logging.root.removeHandler(handler)
logging.root.setLevel(logging.WARNING)
shown["logging"] = stream.getvalue().splitlines()

print("shown:", json.dumps(shown, default=str))
