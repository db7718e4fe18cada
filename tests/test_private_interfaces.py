"""Private interfaces of torch, ipykernel and ipyparallel that this package uses. If an upgrade removes one, a test here
fails. Where a fallback exists, it is tested too."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import IPython
import pytest
import torch
from ipykernel import ipkernel
from ipykernel._version import version_info as ipykernel_version
from ipykernel.comm import comm as comms
from ipykernel.compiler import XCachingCompiler
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from ipykernel.zmqshell import ZMQInteractiveShell
from ipyparallel.client.client import Client
from ipyparallel.cluster import launcher
from ipyparallel.cluster.cluster import Cluster
from ipyparallel.controller.app import IPController
from ipyparallel.engine.app import IPEngine
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.session import Session
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.rpc import api
from torch.utils.data._utils import fetch as fetchers
from traitlets.config import Config

from ddp_notebook.launch.elastic import elastic_agent
from ddp_notebook.messages.encoding import VERSION
from ddp_notebook.messages.first_messages import ObserveScript
from ddp_notebook.messages.processes import Address
from ddp_notebook.rank.cell import kernel_api, script_functions
from ddp_notebook.rank.cell.current_line import CurrentLine
from ddp_notebook.rank.debug import adapter
from ddp_notebook.rank.engine import can_wait
from ddp_notebook.rank.group.arguments import InitArguments
from ddp_notebook.rank.group.calls import timeout_setter
from ddp_notebook.rank.rpc.open_calls import INVOKES
from ddp_notebook.rank.script import script_observer
from ddp_notebook.registry.torchrun import place
from ddp_notebook.run.output import display_target
from ddp_notebook.run.output.comms import _comm_maker
from ddp_notebook.torchrun import start_job

# Before ipykernel 6.18 its comms have no base class in common with those of other kernels.
COMM = getattr(comms, "BaseComm", comms.Comm)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_ipykernel_keeps_other_cells_out():
    """Version 7 has a lock and version 6 has a queue; `run_in_turn` supports both."""
    source = inspect.getsource(IPythonKernel.__mro__[1])
    assert "_main_asyncio_lock" in source or hasattr(IPythonKernel, "schedule_dispatch")


def test_a_shells_variables_are_set_without_one(monkeypatch):
    """A rank sets the variables of the shell before its group forms."""
    monkeypatch.setattr(os, "environ", {})
    kernel_api.settle_environment()
    before = dict(os.environ)

    ZMQInteractiveShell.init_environment(ZMQInteractiveShell.__new__(ZMQInteractiveShell))

    assert before["PAGER"] == "cat" and before == os.environ


def test_a_kernel_asks_its_modules_sys_for_modules():
    if ipykernel_version >= (7, 4):  # older versions do not search `sys.modules`
        source = inspect.getsource(IPythonKernel.__init__)
        assert "_kernel_modules" in source and "sys.modules" in source
    with kernel_api.without_modules():
        assert vars(ipkernel)["sys"].modules == {}
        assert vars(ipkernel)["sys"].version == sys.version
    assert vars(ipkernel)["sys"] is sys


def test_ipython_names_the_files_of_cells_and_keeps_tracebacks():
    assert list(inspect.signature(XCachingCompiler.get_code_name).parameters) == ["self", "raw_code", "code", "number"]
    if IPython.version_info >= (9, 1):
        assert "_format_exception_for_storage(" in inspect.getsource(InteractiveShell.run_cell_async)
    if ipykernel_version >= (7, 2):
        assert "self._last_traceback_during_displayhook = True" in inspect.getsource(ZMQInteractiveShell)
    assert all(hasattr(kind, "transform") for kind in TransformerManager().token_transformers)
    for kind in (InteractiveShell, DisplayHook):
        assert "_oh" in inspect.getsource(kind)


def test_ipython_tells_which_statement_it_compiles():
    """An interrupt can arrive during the compilation, after the statements above have run."""
    where, places = CurrentLine(), []

    class Compiler(CachingCompiler):
        def __call__(self, *args, **named):
            places.append(where.of_frame(sys._getframe()))
            return super().__call__(*args, **named)

    shell = InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}), user_module=ModuleType("cells"))
    shell.compile = Compiler()
    assert shell.run_cell("a = 1\n\nif a:\n    b = a + 1\nb;").success
    shell.showtraceback = lambda *_, **__: places.append(where.of_frame(sys._getframe()))  # type: ignore[method-assign]
    shell.run_cell("1 / 0")
    assert places == ["cell line 1", "cell line 3", "cell line 5", "cell line 1", ""]
    assert where.of_frame(sys._getframe()) == ""


def test_a_kernel_tells_these_which_message_it_answers():
    """`kernel_api.Parents` sets the parent message of each cell in these objects."""
    told = set(re.findall(r"([\w.]+)\.set_parent\(", inspect.getsource(ZMQInteractiveShell.set_parent)))
    assert {"self.displayhook", "self.display_pub"} <= told
    assert told <= {"self.displayhook", "self.display_pub", "self.data_pub", "sys.stdout", "sys.stderr"}
    told = set(re.findall(r"(\S+)\.set_parent\(", inspect.getsource(IPythonKernel.set_parent)))
    assert told == {"super()", "self.shell"}


def test_session_send_takes_what_we_pass_on():
    names = list(inspect.signature(Session.send).parameters)
    assert names[:5] == ["self", "stream", "msg_or_type", "content", "parent"]
    assert "metadata" in names and "buffers" in names
    sending = inspect.getsource(getattr(COMM, "publish_msg" if hasattr(COMM, "publish_msg") else "_publish_msg"))
    assert "metadata=" in sending and "buffers=" in sending, "by keyword, as `intercept_sends` looks for them"


def test_a_comm_can_be_heard_before_it_is_opened():
    """Otherwise an answer of the browser could arrive before its handler exists."""
    comm = _comm_maker()(target_name="jupyter.widget", comm_id="1", primary=False)
    assert not comm._closed or comms.Comm is COMM, "older ones are open where there is a kernel"
    assert list(inspect.signature(COMM.open).parameters) == ["self", "data", "metadata", "buffers"]


def test_ipyparallel_hooks():
    if hasattr(IPEngine, "redirect_output"):  # ipyparallel 9
        assert callable(IPEngine.restore_output) and inspect.iscoroutinefunction(IPEngine.register)
        assert "self.loop.run_sync(self._start)" in inspect.getsource(IPEngine.start)
    else:
        source = inspect.getsource(IPEngine._complete_registration)
        assert "self.kernel = Kernel.instance(" in source and "self.out_stream_factory(" in source
        assert "self.register()" in inspect.getsource(IPEngine.start)
    for name in ("max_heartbeat_misses", "enable_nanny", "id", "timeout", "work_dir"):
        assert name in IPEngine.class_trait_names()
    for name in ("curve_secretkey", "restore_engines", "reuse_files", "engine_ports", "client_ports", "ports"):
        assert name in IPController.class_trait_names()
    for name in ("_io_loop", "_closed", "outstanding"):
        assert name in Client.class_trait_names() or hasattr(Client, name)
    assert list(inspect.signature(Client._handle_apply_reply).parameters) == ["self", "msg"]
    assert "children" in IPController.class_trait_names()
    assert "self.heartmonitor_process" in inspect.getsource(IPController)


def test_torch_raises_the_timeout_of_a_formed_group():
    from torch.distributed import distributed_c10d as c10d

    setter, places = timeout_setter()
    assert callable(setter) and all(getattr(module, name) is setter for module, name in places)
    assert c10d._get_default_timeout(c10d.Backend("gloo")).total_seconds() == 1800
    assert not inspect.signature(c10d._get_default_store).parameters


def test_without_the_kernels_lock_our_own_keeps_order():
    class Bare:
        """A kernel of a version without a lock and without a queue."""

    async def main() -> list[str]:
        order: list[str] = []

        async def work(name: str) -> None:
            order.append(name)
            await asyncio.sleep(0)
            order.append(name)

        kernel = Bare()
        kernel_api.run_in_turn(kernel, work, "a")
        kernel_api.run_in_turn(kernel, work, "b")
        while len(order) < 4:
            await asyncio.sleep(0)
        return order

    assert asyncio.run(main()) == ["a", "a", "b", "b"]


def test_without_a_message_taken_the_session_sends_as_before():
    sent = []

    class Recorder:
        def send(self, stream, msg_or_type, content=None, parent=None, ident=None):
            sent.append((stream, msg_or_type, content, parent, ident))
            return "sent"

    session = Recorder()
    kernel_api.intercept_sends(session, lambda kind, body, header, *_: header.get("msg_id") == "ours")
    assert session.send("iopub", "status", {"a": 1}, parent={"header": {"msg_id": "theirs"}}, ident=b"x") == "sent"
    assert session.send("iopub", "status", {"a": 1}, parent={"header": {"msg_id": "ours"}}) is None
    assert sent == [("iopub", "status", {"a": 1}, {"header": {"msg_id": "theirs"}}, b"x")]


def test_what_is_not_forked_is_pickled_by_one_function():
    import multiprocessing.popen_forkserver
    import multiprocessing.popen_spawn_posix
    from multiprocessing import reduction

    assert list(inspect.signature(reduction.dump).parameters) == ["obj", "file", "protocol"]
    for module in (multiprocessing.popen_spawn_posix, multiprocessing.popen_forkserver):
        assert "reduction.dump(" in inspect.getsource(module)


def test_torch_lets_operations_be_observed_and_sent_elsewhere():
    from torch._C._distributed_c10d import Backend, ProcessGroup, ProcessGroupGloo, Work
    from torch.distributed import distributed_c10d as c10d

    from ddp_notebook.rank.group.operators import SPECS

    missing = [name for name in SPECS if not hasattr(torch.ops.c10d, name)]
    assert not set(missing) - {"gather_into_tensor_"}  # only torch 2.15 has it
    for name, spec in SPECS.items():
        if name in missing:
            continue
        arguments = [argument.name for argument in getattr(torch.ops.c10d, name).default._schema.arguments]
        # The arguments are tensors, then the group, then the rest. A recorded call keeps the arguments after the group.
        tensors = [one for one in (spec.input, spec.output) if one]
        assert all(arguments.index(one) < arguments.index("process_group") for one in tensors)
    for key in ("BackendSelect", "Negative", "Conjugate"):
        assert torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))
    assert callable(torch.library.Library._destroy)
    assert callable(torch.ops.c10d.allreduce_.default._handle.redispatch_boxed)
    assert all(callable(getattr(kind, "unbox", None)) for kind in (ProcessGroup, Work))
    for name in ("pg_map", "pg_names", "group_count"):
        assert hasattr(c10d._world, name)
    for maker in (c10d._new_group_with_tag, inspect.unwrap(c10d.init_process_group)):
        assert "_new_process_group_helper(" in inspect.getsource(maker)
    assert "_hash_ranks_to_str(ranks)" in inspect.getsource(c10d._process_group_name)
    names = ["_start_coalescing", "_end_coalescing", "_register_backend", "_set_default_backend", "_get_backend"]
    for name in (*names, "_set_group_name", "_set_group_desc"):
        assert callable(getattr(ProcessGroup, name))
    assert callable(ProcessGroupGloo._set_default_timeout)
    assert callable(Backend.eager_connect_single_device) and vars(ProcessGroup)["bound_device_id"].fset is not None
    assert c10d.BackendConfig(c10d.Backend("gloo")).device_backend_map["cpu"] == "gloo"


def test_the_gloo_event_loop_has_its_listener_and_connections(monkeypatch):
    """It holds no other file descriptors. This is how `sockets` finds them, see `tests/test_sockets.py`."""
    from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

    from ddp_notebook.rank.group.connections import sockets

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = sockets.listeners().keys()
    group = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    (listener,) = sockets.listeners().keys() - before
    assert {listener} in sockets._loops()
    assert sockets.gloo_listeners(before).keys() == {listener}
    del group


def test_gloo_has_buffers_that_can_be_told():
    """The symbols exist in torch's library. `tests/test_untold.py` tests their use."""
    from ddp_notebook.rank.group.connections import stuck_waits

    assert stuck_waits._gloo() is not None


@pytest.mark.long
def test_an_agent_of_rpc_starts_alone_and_is_told_of_others():
    """It runs in a separate process, because an agent exists until its process ends."""
    code = """if True:
        import sys
        from ddp_notebook.rank.rpc.rpc_agent import RpcAgent, Worker
        from torch.distributed import rpc
        from torch.distributed.rpc import api
        no_devices = dict(device_count=0, device_maps={}, devices=[])
        made = [Worker(name=name, rank=i, here=i, number=i, **no_devices)
                for i, name in enumerate("ab")]
        agent = RpcAgent(made[0], made, rpc.TensorPipeRpcBackendOptions())
        agent.learn(made[0], made, [agent.address, "uv://127.0.0.1:1"])
        known = api._get_current_rpc_agent()
        assert {info.name for info in known.get_worker_infos()} == {"a", "b"}
        assert known._get_device_map(known.get_worker_info("b")) == {} and known.get_worker_info().name == "a"
        assert agent.calls_under_way == 0 and agent.address.startswith("uv://")
        kind = rpc.RRef(1)._get_type(blocking=False)
        from ddp_notebook.rank.rpc.rref_values import _has_type
        import torch
        add = rpc.remote("a", torch.add, args=(torch.ones(1), 1))
        number = rpc.remote("a", abs, args=(1,))
        assert _has_type(add) and not _has_type(number)
        add.to_here(), number.to_here()  # the agent's threads pickle no more
        from torch.distributed.rpc import internal
        internal._pickler = None
        try:
            internal.serialize(1)
        except TypeError:
            print("pickles with it")
        print("alive", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pickles with it\nalive" in done.stdout, done.stderr
    of_api = "_init_rpc_states", "_get_should_profile", "_to_worker_info", "_is_current_rpc_agent_set"
    for name in (*of_api, "_ALL_WORKER_NAMES", *INVOKES):
        assert hasattr(api, name)


def test_torch_lets_remote_calls_be_recorded():
    """The agent runs what a call unpickles to. Numbers of references and messages can be read. A send and a recv of
    distributed autograd report when a gradient passes (`rank/rpc/`: recorder, references, contexts)."""
    import torch.distributed.autograd as dist_autograd
    from torch._C import _distributed_autograd
    from torch._C._distributed_rpc import PyRRef
    from torch.distributed.rpc import internal

    assert internal.PythonUDF._fields == ("func", "args", "kwargs") and callable(internal._run_function)
    assert callable(internal.deserialize)
    for name in ("_py_rref_reducer", "_py_rref_receiver"):
        assert name in vars(internal._InternalRPCPickler)
    assert {"_deserialize", "_serialize", "is_owner", "to_here", "local_value"} <= set(dir(PyRRef))
    assert {"_send_functions", "_recv_functions"} <= set(dir(_distributed_autograd.DistAutogradContext))
    assert callable(_distributed_autograd._retrieve_context)
    for name in ("__enter__", "__exit__"):
        assert name in vars(dist_autograd.context)


def test_without_these_rpc_is_torchs_own(monkeypatch, capsys):
    from ddp_notebook.rank.rpc import feature as ours

    def init_rpc() -> None: ...

    replaced = []
    monkeypatch.setattr(ours, "replace", lambda *both: replaced.append(both))
    monkeypatch.setitem(sys.modules, "ddp_notebook.rank.rpc.rpc_functions", None)
    monkeypatch.setattr("torch.distributed.rpc.init_rpc", init_rpc)
    ours.FEATURE(SimpleNamespace(place=None, running=None)).engine_ready()  # type: ignore[arg-type]
    ((original, instead),) = replaced
    instead()
    assert original is init_rpc and "does not support this version of torch" in capsys.readouterr().out


def test_torch_lets_its_waits_be_replaced():
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

    assert torch.futures.Future.__mro__[1] is torch._C.Future and "wait" in torch._C.Future.__dict__
    assert callable(torch._C.Future.done) and callable(torch._C.Future.add_done_callback)
    for kind in (FileStore, HashStore, PrefixStore, TCPStore):
        assert not {"wait", "get", "multi_get"} & set(kind.__dict__), "they inherit them, so ours stand before"
    for name in ("wait", "get", "multi_get", "check", "timeout", "set_timeout"):
        assert name in Store.__dict__
    assert "underlying_store" in PrefixStore.__dict__
    words = str(TCPStore.__init__.__doc__)
    names = ["host_name: str", "port: ", "world_size: ", "is_master: bool", "timeout: ", "wait_for_workers: bool"]
    assert sorted(names, key=words.index) == names, words


@pytest.mark.slow
def test_torch_lets_pipelines_be_seen():
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.pipelining import schedules, stage

    # notebook 12 patches this method, where it exists
    if hasattr(stage._PipelineStageBase, "_get_init_p2p_neighbors_ops"):
        assert list(inspect.signature(stage._PipelineStageBase._get_init_p2p_neighbors_ops).parameters) == ["self"]
        assert "self.group_peer = " in inspect.getsource(c10d.P2POp) and "self.group_rank" in inspect.getsource(stage)
    Stage = stage._PipelineStageBase
    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        assert list(inspect.signature(getattr(Stage, name)).parameters)[1].endswith("_chunk_id")
    assert list(inspect.signature(Stage.backward_one_chunk).parameters)[2:4] == ["loss", "full_backward"]
    for name in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        assert list(inspect.signature(getattr(Stage, f"get_{name}_ops")).parameters) == ["self", f"{name[:3]}_chunk_id"]
    source = inspect.getsource(stage)
    for name in ("stage_index", "num_stages", "submod", "group", "group_size", "chunks", "has_backward"):
        assert f"self.{name}" in source
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        assert "target" in inspect.signature(kind.step).parameters
    source = inspect.getsource(schedules)
    for name in ("_n_microbatches", "_args_chunk_spec", "_stage", "_stages"):
        assert f"self.{name} = " in source


def test_a_data_loader_waits_with_its_timeout():
    from torch.utils.data import _utils, dataloader

    iterator = dataloader._MultiProcessingDataLoaderIter
    [_, timeout] = inspect.signature(iterator._try_get_data).parameters.values()
    assert timeout.default == _utils.MP_STATUS_CHECK_INTERVAL
    assert "self._try_get_data(self._timeout)" in inspect.getsource(iterator._get_data)


@pytest.mark.slow
def test_a_data_loader_joins_its_workers():
    """`rank.cell.children` terminates the workers, with which their parent's SIGTERM is a successful exit."""
    from torch.utils.data import dataloader

    source = inspect.getsource(dataloader._MultiProcessingDataLoaderIter._shutdown_workers)
    assert "for w in self._workers:" in source and "w.join(timeout=" in source and "w.terminate()" in source


def test_torch_lets_training_be_seen():
    from torch._compile import _disable_dynamo
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import dataloader

    assert callable(_disable_dynamo)
    assert callable(importlib.import_module("torch._dynamo.trace_rules").add)
    assert torch.ops._c10d_functional.wait_tensor.default._schema.arguments[0].name == "tensor"
    assert "parameters_to_ignore" in inspect.getsource(DistributedDataParallel.__init__)
    assert "self._use_python_reducer = " in inspect.getsource(DistributedDataParallel.__init__)
    assert callable(torch._C._distributed_c10d.Logger.set_runtime_stats_and_log)
    assert "dist._register_comm_hook(self.reducer, state, hook)" in inspect.getsource(DistributedDataParallel)
    for name in ("_pre_forward", "_post_forward"):
        assert callable(getattr(_fsdp_state.FSDPState, name))
    names = list(inspect.signature(_fsdp_param_group.FSDPParamGroup.__init__).parameters)
    assert names[1:4] == ["params", "modules", "mesh_info"]
    assert "shard_process_group" in inspect.getsource(_fsdp_param_group)
    assert "iter_forward_root" in inspect.getsource(_fsdp_state)
    assert "self._module_fqn" in inspect.getsource(_fsdp_param_group.FSDPParamGroup)
    for name in ("__next__", "_next_index", "_reset"):
        assert callable(getattr(dataloader._BaseDataLoaderIter, name))
    assert "self._next_index()" in inspect.getsource(dataloader._SingleProcessDataLoaderIter._next_data)
    assert "self._next_index()" in inspect.getsource(dataloader._MultiProcessingDataLoaderIter._try_put_index)
    for module in (torch.autograd, torch.autograd.graph):
        assert callable(module._engine_run_backward)
        assert "_engine_run_backward(" in inspect.getsource(module)
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    compiles: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        compiles.append(get_eval_frame_callback() is not None)
        return x

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    whole = torch.compile(lambda x: plain(x) + 1, backend="eager", fullgraph=True)
    assert whole(torch.ones(1)) == 3
    plain._torchdynamo_disable = True  # type: ignore[attr-defined]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(torch.ones(1))
    for is_recursive in (True, False):  # disabled with and without the functions that it calls
        looking = torch._dynamo.disable(look, recursive=is_recursive)
        torch.compile(lambda x, do=looking: do(x + 1) + 1, backend="eager")(torch.ones(1))
    look(torch.ones(1))
    assert compiles == [False, True, False]
    x = torch.ones(1, requires_grad=True)
    inside: list[int] = []
    x.register_hook(lambda _: inside.append(torch._C._current_graph_task_id()))
    x.backward()
    assert inside != [-1] and torch._C._current_graph_task_id() == -1
    from torch.distributed.tensor._api import _FromTorchTensor
    from torch.distributed.tensor._redistribute import Redistribute

    # `rank.group.modules` stores a module's name in the contexts of these functions
    for function in (_FromTorchTensor, Redistribute):
        assert list(inspect.signature(function.forward).parameters)[:4:3] == ["ctx", "placements"]
        assert "ctx" in function.backward.__code__.co_varnames
    assert "self" in torch.nn.Module._call_impl.__code__.co_varnames
    assert callable(DistributedDataParallel._get_ddp_logging_data)
    assert "_has_rebuilt_buckets" in inspect.getsource(DistributedDataParallel._pre_forward)


def test_fsdp_stores_its_shards_and_returns_its_mesh_dimensions():
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fully_shard

    assert "self.sharded_param = nn.Parameter(" in inspect.getsource(_fsdp_param.FSDPParam)
    if TORCH >= (2, 12):
        assert "_get_mesh_info(mesh, dp_mesh_dims)" in inspect.getsource(_fully_shard)


def test_torch_lets_a_model_begin_anew():
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    source = inspect.getsource(DistributedDataParallel)
    for name in (
        "_update_process_group",
        "_has_rebuilt_buckets",
        "_comm_hooks",
        "_register_comm_hook",
        "require_forward_param_sync",
    ):
        assert name in source
    assert callable(getattr(FSDPModule, "reset_iter_state", None)) or TORCH < (2, 13)


def test_torch_returns_the_source_rank_of_a_recv_from_any_rank():
    from torch._C._distributed_c10d import Work

    assert callable(Work._source_rank)


def test_torch_lets_buckets_be_chosen_for_a_reducer():
    from torch.nn.parallel import DistributedDataParallel

    helper = inspect.getsource(DistributedDataParallel._ddp_init_helper)
    assert "dist._compute_bucket_assignment_by_size(" in helper and "list(reversed(bucket_indices))" in helper
    assert "self.reducer._rebuild_buckets()" in inspect.getsource(DistributedDataParallel._pre_forward)


def test_torch_lets_operators_be_left_out_of_what_it_shows():
    from torch._C import _distributed_c10d

    from ddp_notebook.rank import hide_from_profiler

    assert hide_from_profiler.is_possible()
    with torch.autograd.profiler.profile() as profile:
        torch.ones(2)
        hide_from_profiler.unseen(torch.zeros, 2)
    names = [one.key for one in profile.key_averages()]
    assert "aten::ones" in names and "aten::zeros" not in names
    assert all(callable(getattr(_distributed_c10d, name)) for name in ("_dump_fr_trace", "_dump_fr_trace_json"))


def test_torchs_log_can_be_quietened():
    import ctypes
    from pathlib import Path

    from ddp_notebook.rank.group import cpp_log

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    level = ctypes.c_int.in_dll(library, cpp_log._LEVEL)
    before = level.value
    with cpp_log.quiet():
        assert level.value > before
    assert level.value == before


def test_an_engine_is_made_before_there_is_a_controller():
    """The state is that after a registration. `complete_registration` needs `id` and `hb_period` of the reply, and
    connects its sockets with the other values of the reply. The fallback for other versions is tested in test_start."""
    assert can_wait()
    complete = getattr(IPEngine, "_complete_registration", IPEngine.complete_registration)
    source = inspect.getsource(complete)
    assert "connect(control_s" in source and "connect(iopub_socket, iopub_addr)" in source
    assert set(re.findall(r"content\['(\w+)'\]", source.replace('"', "'"))) == {"status", "id", "hb_period"}
    assert "def connect(s, url, curve_serverkey=None)" in inspect.getsource(IPEngine.init_connector)
    assert len(inspect.signature(IPEngine.start_heartbeat).parameters) == 5
    registration = inspect.getsource(IPEngine.register).replace('"', "'")
    assert "registration_request" in registration and "content = dict(uuid=self.ident)" in registration
    assert "json.loads(self.connection_info_env)" in inspect.getsource(IPEngine.load_connection_file)


def test_a_controller_adopts_connection_files():
    """The files are those that the controller would have written itself."""
    from ddp_notebook.launch import controller

    written = inspect.getsource(IPController.init_hub)
    with tempfile.TemporaryDirectory() as directory:
        controller.write_files(controller.make_spec(directory))
        for side in ("engine", "client"):
            for name in json.loads(controller.connection_file(directory, side).read_text()):
                assert f"'{name}'" in written or name == "broadcast"
    assert "self.load_config_from_json()" in inspect.getsource(IPController.load_secondary_config)
    assert IPController.broadcast_scheduler_depth.default_value == 1


def test_without_these_a_rank_works_and_says_what_it_cannot(monkeypatch, capsys):
    from ddp_notebook.rank.group import network, recorder, release

    def refuse(_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(recorder.Recorder, "install", refuse)
    monkeypatch.setattr(release.Release, "start", lambda _: None)
    made = network.Network()
    assert "cannot be observed (no such operator)" in capsys.readouterr().err
    made.begin_cell(1)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    for _ in range(2):  # nothing is recorded, so there must be no warning about ranks that train separately
        optimizer.step()
    assert made.end_cell(None) == {}


def test_a_kernel_sends_for_a_cell_that_has_ended(monkeypatch):
    assert {"get_parent", "iopub_socket", "session"} <= {*dir(IPythonKernel)}
    assert {"stream", "msg_or_type", "content", "parent", "ident"} <= {*inspect.signature(Session.send).parameters}
    monkeypatch.setattr(display_target, "kernel", object)
    assert type(display_target.of_this_cell()) is display_target.ThreadTarget, (
        "without these it shows where the thread's output goes"
    )


def test_a_kernel_reads_requests_in_a_thread():
    """`tests/completion` checks the replies while a cell runs."""
    assert list(inspect.signature(IPythonKernel.do_complete).parameters) == ["self", "code", "cursor_pos"]
    assert list(inspect.signature(IPythonKernel.do_inspect).parameters)[:4] == [
        "self",
        "code",
        "cursor_pos",
        "detail_level",
    ]
    assert hasattr(DisplayHook, "exec_result") or "exec_result" in inspect.getsource(DisplayHook)
    if ipykernel_version >= (7,):
        assert {"shell_channel_thread", "shell_channel_thread_main", "shell_stream"} <= {*dir(IPythonKernel)}
        source = inspect.getsource(Kernel.start)
        assert "self.shell_stream.on_recv(self.shell_channel_thread_main, copy=False)" in source


@pytest.mark.processes
def test_a_kernel_has_a_debugger_for_its_own_process(monkeypatch):
    """`tests/debug/test_front_end.py` checks that it stops ranks. An import of debugpy starts `uname`."""
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    from ipykernel import compiler
    from ipykernel.control import ControlThread
    from ipykernel.debugger import Debugger
    from IPython.core.history import HistoryManager

    assert list(inspect.signature(IPythonKernel.do_debug_request).parameters) == ["self", "msg"]
    assert "self.do_debug_request(content)" in inspect.getsource(Kernel.debug_request)
    assert list(inspect.signature(Debugger.accept_variable).parameters) == ["self", "variable_name"]
    source = inspect.getsource(Debugger.__init__)
    for name in ("is_started", "breakpoint_list", "stopped_threads", "event_callback"):
        assert f"self.{name} = " in source
    assert "cleanup_transforms.pop(index)" in inspect.getsource(Debugger.start), "leading empty lines are kept"
    loop: Any = ControlThread().io_loop
    assert isinstance(loop.asyncio_loop, asyncio.AbstractEventLoop)
    loop.close()
    assert "input_hist_raw" in HistoryManager.class_trait_names()
    assert compiler.get_file_name("x\n").startswith(compiler.get_tmp_directory())


@pytest.mark.processes
def test_pydevd_accepts_a_connection_that_is_given_to_it():
    """In another process, because pydevd changes the process in which it is imported."""
    code = """
import inspect, debugpy.server, pydevd, pydevd_file_utils
from _pydevd_bundle import pydevd_api, pydevd_constants, pydevd_comm, pydevd_comm_constants, pydevd_daemon_thread
from _pydevd_bundle import pydevd_thread_lifecycle
from _pydevd_bundle.pydevd_additional_thread_info import set_additional_thread_info
assert "start_client(host, port)" in inspect.getsource(pydevd.PyDB.connect)
waits = ["self", "thread", "frame", "event", "arg"]
assert list(inspect.signature(pydevd.PyDB.do_wait_suspend).parameters)[:5] == waits
assert "pydevd_file_utils.exists(" in inspect.getsource(pydevd_api.PyDevdAPI.add_breakpoint)
wait = inspect.getsource(pydevd.PyDB._do_wait_suspend)
assert "info.pydev_state != STATE_SUSPEND" in wait and "internal_cmd.do_it(self)" in wait
assert callable(pydevd_comm.InternalThreadCommand.do_it)
assert "pydev_do_not_trace" in inspect.getsource(pydevd_daemon_thread.mark_as_pydevd_daemon_thread)
assert "is_pydev_daemon_thread" in inspect.getsource(pydevd_daemon_thread.mark_as_pydevd_daemon_thread)
assert pydevd_constants.PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING and pydevd_constants.DISABLE_FILE_VALIDATION
assert not pydevd_constants.PYDEVD_USE_SYS_MONITORING
pydevd.get_global_debugger, pydevd.PyDB.set_suspend, pydevd.PyDB.enable_tracing, pydevd.PyDB.disable_tracing
assert "self.trace_dispatch = " in inspect.getsource(pydevd.PyDB.__init__)
pydevd_constants.STATE_RUN, pydevd_comm_constants.CMD_SET_BREAK
pydevd_thread_lifecycle.internal_run_thread, pydevd_api.PyDevdAPI.set_dont_trace_start_end_patterns
"""
    environment = {**os.environ, **adapter._SETTINGS}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_comm_says_where_what_the_browser_says_goes():
    from ddp_notebook.widgets import monitor

    route = getattr(COMM, monitor._ROUTE, None)
    if ipykernel_version < (7, 4):
        assert route is None
    elif ipykernel_version[:2] == (7, 4) or route is not None:  # a later version may work without it
        assert route is not None
        assert list(inspect.signature(route).parameters) == ["self", "data", "default"]


def test_a_comm_without_that_is_left_as_it_is():
    from ddp_notebook.widgets.monitor import hear_at_once

    comm = object()  # an object without attributes
    hear_at_once(comm)


def test_ipyparallel_launchers():
    """The launcher of a profile is created and started as in `ipp.Cluster`, with another command."""
    making = inspect.getsource(Cluster.start_engines)
    assert "engine_set = self.engines[engine_set_id] = self.engine_launcher_class(" in making
    for name in (
        "work_dir=",
        "parent=",
        "log=",
        "profile_dir=",
        "cluster_id=",
        "engine_set_id=",
        "engine_set.start(n)",
    ):
        assert name in making
    traits = {"state", "stop_data", "environment", "engine_cmd", "engine_args"}
    assert traits <= set(launcher.EngineLauncher.class_trait_names())
    assert {"n", "profile_dir"} <= set(Cluster.class_trait_names())
    batch = launcher.BatchEngineSetLauncher
    assert {"context", "formatter", "namespace", "batch_template", "batch_template_file", "job_id"} <= set(
        batch.class_trait_names()
    )
    if hasattr(batch, "_run_command"):  # ipyparallel 9
        assert "output = self._run_command(self.args, env=env)" in inspect.getsource(launcher.BatchSystemLauncher.start)
    assert "os.path.join(self.work_dir, self.batch_file_name)" in inspect.getsource(launcher.BatchSystemLauncher)
    of_ssh = launcher.SSHEngineLauncher.class_traits(config=True)
    assert {"to_send", "environment", "ssh_args", "scp_args"} <= set(of_ssh)


def test_cloudpickle_tells_what_a_function_is_made_of():
    """`copying.Pickler` replaces the global variables of a function by those of the receiving rank."""
    pickler = cloudpickle.Pickler(io.BytesIO(), protocol=5)
    function = eval("lambda: kept", {"kept": 3})
    make, (code, variables, *_), (attributes, slots), *_ = pickler.reducer_override(function)
    assert callable(make) and code is function.__code__ and type(variables) is type(attributes) is dict
    assert slots["__globals__"] == {"kept": 3}


def test_an_ipyparallel_engine_gets_broadcasts_of_one_scheduler():
    """The id of an engine selects the scheduler, so an engine with another id is connected to another scheduler."""
    source = inspect.getsource(IPEngine)
    assert "broadcast_index = self.id % len(broadcast_urls)" in source
    in_9, in_8 = "shell_socket = self.shell_socket = ctx.socket(zmq.ROUTER)", "ZMQStream(ctx.socket(zmq.ROUTER), loop)"
    assert in_9 in source or in_8 in source  # such a socket can have several connections


def test_torchrun_has_a_store_for_each_attempt_if_it_is_told_to():
    """`launch.elastic.elastic_agent` sets the first variable. The ranks read from the second whether it is set."""
    source = inspect.getsource(dynamic_rendezvous)
    assert (
        source.count(f'os.getenv("{elastic_agent.OWN_STORES}", "0") == "1"')
        + source.count(f'os.getenv("{elastic_agent.OWN_STORES}", "0") != "1"')
        == 2
    )
    assert '"TORCHELASTIC_USE_AGENT_STORE": str(use_agent_store)' in inspect.getsource(local_elastic_agent)
    for name in dict(pair.split("=") for pair in start_job._TIMES.split(",")):
        assert f'"{name.removesuffix("_timeout")}"' in source


def test_a_script_continues_if_torch_cannot_be_observed(monkeypatch, capsys):
    def missing(*_):
        raise AttributeError("torch has no such thing")

    monkeypatch.setattr(script_observer, "_Seen", missing)
    one = script_observer.ScriptObserver(place("train.py", [], "", 1))
    one.install()
    assert capsys.readouterr().err == (
        "ddp_notebook: a notebook cannot attach to scripts with this version of torch (torch has no such thing)\n"
    )
    nowhere = Address(control="", bulk="", server_key="", public_key="", secret_key="", identity="")
    one.begin(ObserveScript(wire=VERSION, who="a notebook", takes=False, address=nowhere, round=1))
    one.end(None)
    one.leave()


def test_torchs_memory_trackers_and_the_places_of_shards():
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert issubclass(FSDPMemTracker, MemTracker)
    tracker = MemTracker()
    model = torch.nn.Linear(64, 64)
    tracker.track_external(model)
    seen: list[int] = []
    update = tracker._update_peak_stats

    def look(state):
        seen.append(len(tracker._curr_mem_snap))
        update(state)

    tracker._update_peak_stats = look  # type: ignore[method-assign]
    enter, parents = tracker._pre_fw_hook, []

    def enter_anew(module, inputs):
        modules = tracker._mod_tracker
        parents.append(set(modules.parents) - {modules.get_known_fqn(module)})
        if module in tracker.memory_tracking and not modules.is_bw:
            tracker.reset_mod_stats()
        enter(module, inputs)

    tracker._pre_fw_hook = enter_anew  # type: ignore[method-assign]
    with tracker:
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
    assert parents == [{"Global"}] * 2
    assert seen and {str(getattr(kind, "value", kind)) for kind in tracker._curr_mem_snap[torch.device("cpu")]} >= {
        *("Parameter", "Buffer", "Gradient", "Activation", "Temp", "Optstate", "Total")
    }
    assert list(inspect.signature(compute_local_shape_and_global_offset).parameters)[:3] == [
        *("global_shape", "mesh", "placements")
    ]


def test_what_signal_wraps_gives_the_same_handlers_and_signals():
    import _signal  # type: ignore[import-not-found]
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        handler = _signal.getsignal(number)
        assert handler is signal.getsignal(number) or handler == signal.getsignal(number)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        assert _signal.pthread_sigmask(signal.SIG_BLOCK, ()) == signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.SIGUSR1 in _signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_torch_functions_check_arguments_without_forming_a_group(monkeypatch, capfd):
    read = InitArguments(lambda: None).read
    with pytest.raises(TypeError, match="timeout"):
        read("gloo", "tcp://127.0.0.1:29500?rank=0&world_size=2", timeout=30)
    asked = read("gloo", "tcp://127.0.0.1:29500?rank=0&world_size=2", timeout=timedelta(seconds=3))
    assert (asked.world_size, asked.rank, asked.timeout) == (2, 0, timedelta(seconds=3))
    assert not torch.distributed.is_initialized() and torch.distributed.distributed_c10d._world.group_count == 0
    monkeypatch.setattr(torch.distributed.distributed_c10d, "init_process_group", lambda backend: None)
    reader = script_functions._reader(lambda: None, inspect.signature(lambda backend=None, rank=-1: None))
    assert "arguments of init_process_group are not checked" in capfd.readouterr().err
    with pytest.raises(AssertionError):  # there is no patched `init_process_group` to replace
        reader("gloo")


def test_multiprocessing_uses_the_folder_that_a_rank_sets(tmp_path, monkeypatch):
    from multiprocessing import process, util

    config = process.current_process()._config  # type: ignore[attr-defined]
    monkeypatch.setitem(config, "tempdir", str(tmp_path))
    assert util.get_temp_dir() == str(tmp_path)


def test_torch_raises_its_errors_in_these_functions():
    """`rank/torch_errors` finds causes by these functions and by their local variables."""
    from torch.distributed import distributed_c10d
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.rpc import api
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data._utils import collate

    places = {
        distributed_c10d: ("get_group_rank", "_canonicalize_group_rank", "_check_not_self_rank", "_object_to_tensor"),
        FSDPState: ("_lazy_init",),
        DistributedDataParallel: ("_pre_forward", "_log_and_throw"),
        api: ("_require_initialized",),
        collate: ("default_collate", "collate_tensor_fn"),
    }
    assert [name for holder, names in places.items() for name in names if not hasattr(holder, name)] == []
    assert {"src", "group"} <= set(inspect.unwrap(distributed_c10d.broadcast).__code__.co_varnames)
    assert "planner" in inspect.unwrap(state_dict_loader._load_state_dict).__code__.co_varnames


def test_tensors_count_changes_and_scalers_mark_optimizers():
    tensor = torch.zeros(2, requires_grad=True)
    before = tensor._version
    optimizer = torch.optim.AdamW([tensor], fused=True)
    scaler = torch.amp.GradScaler("cpu")
    assert getattr(optimizer, "found_inf", None) is None
    seen = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(getattr(optimizer, "found_inf", None)))
    scaler.scale(tensor.sum()).backward()
    scaler.step(optimizer)
    with torch.no_grad():
        tensor.add_(1)
    assert tensor._version > before
    assert len(seen) == 1 and isinstance(seen[0], torch.Tensor)


def test_autograd_shows_its_saved_tensors():
    unpacked: list[object] = []
    layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3)

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        node = layer(x).grad_fn
    assert node is not None
    saved = [getattr(node, name).data for name in dir(node) if name.startswith("_raw_saved_")]
    assert any(one is not None and one.data_ptr() == x.data_ptr() for one in saved) and unpacked == []
    assert any(getattr(one, "variable", None) is layer.bias for one, _ in node.next_functions)


def test_what_a_repeated_forward_needs():
    """`rank/record/nan` observes calls of modules, and repeats forwards of FSDP."""
    from torch.amp.grad_scaler import GradScaler
    from torch.distributed.fsdp import _flat_param

    assert torch.nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert "optimizer.step" in inspect.getsource(GradScaler._maybe_opt_step)
    assert isinstance(torch.autograd._get_sequence_nr(), int)  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert parameter._post_accumulate_grad_hooks
    for name in ("_params", "_saved_grad_shard", "_cpu_grad"):
        assert re.search(rf"\b{name}\b", inspect.getsource(_flat_param)), name


def test_torch_keeps_a_history_of_its_allocator():
    """The functions exist without a GPU, and the documented structure has the fields that are read."""
    memory = torch.cuda.memory
    assert {"enabled", "context", "stacks", "max_entries"} <= set(
        inspect.signature(memory._record_memory_history).parameters
    )
    structure = memory._snapshot.__doc__ or ""
    for name in ("segments", "device_traces", "blocks", "requested_size", "active_allocated", "frames", "oom"):
        assert name in structure
    if torch.backends.cuda.is_built():  # from torch 2.15, a call needs a driver
        assert callable(torch._C._cuda_isHistoryEnabled)
    if torch.cuda.is_available():
        assert torch._C._cuda_isHistoryEnabled() is False


def test_loaders_fetch_batches_with_these_classes():
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    iterator: Any = iter(torch.utils.data.DataLoader(data, batch_size=2))
    fetcher = iterator._dataset_fetcher
    assert fetchers._BaseDatasetFetcher in type(fetcher).__mro__ and len(fetcher.fetch([0, 1])[0]) == 2
    fetcher.fetch = lambda index: "replaced"
    assert next(iterator) == "replaced" and isinstance(iterator._base_seed, int)
    assert issubclass(fetchers._IterableDatasetFetcher, fetchers._BaseDatasetFetcher)
    assert isinstance(torch.nn.Dropout(), torch.nn.modules.dropout._DropoutNd)


def test_wrappers_of_a_verified_step():
    """`rank/verify` keeps DDP and FSDP2 from communicating, and reads which parameters they average."""
    from pathlib import Path

    from torch._C._distributed_c10d import Reducer
    from torch.distributed.fsdp import _flat_param, fully_sharded_data_parallel
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
    from torch.nn.parallel import DistributedDataParallel

    for name in ("_get_zeros_like_grad_buckets", "_reset_state"):
        assert callable(getattr(Reducer, name))
    assert callable(DistributedDataParallel._pre_forward)
    source = inspect.getsource(DistributedDataParallel)
    names = ["_comm_hooks", "parameters_to_ignore", "require_forward_param_sync", "require_backward_grad_sync"]
    for name in (*names, "_module_parameters", "_static_graph_delay_allreduce_enqueued", "modules_buffers"):
        assert f"self.{name}" in source, name
    # An import of torch.distributed.optim warns.
    optimizers = Path(torch.distributed.__path__[0], "optim", "apply_optimizer_in_backward.py").read_text()
    assert "_in_backward_optimizers" in optimizers
    assert hasattr(torch.compile(lambda: 1, backend="eager"), "_torchdynamo_orig_callable")
    for name in ("_fsdp_param_groups?", "_mp_policy"):  # torch 2.11: one group
        assert re.search(rf"self\.{name}\b", inspect.getsource(_fsdp_state)), name
    flat = inspect.getsource(_flat_param)
    names = ["_params", "_param_infos", "_shared_param_infos", "_shapes", "_numels_with_padding", "_is_padding_mask"]
    for name in (*names, "_sharded_size", "_local_shard", "uses_sharded_strategy"):
        assert re.search(rf"\b{name}\b", flat), name
    for name in ("_handle", "_sync_gradients", "_fsdp_wrapped_module"):
        assert re.search(rf"\b{name}\b", inspect.getsource(fully_sharded_data_parallel)), name
    group = inspect.getsource(_fsdp_param_group.FSDPParamGroup)
    for name in ("mesh_info", "reduce_grads", "gradient_divide_factor", "fsdp_params"):
        assert f"self.{name}" in group, name
    assert "self.mp_policy" in inspect.getsource(_fsdp_param.FSDPParam)
