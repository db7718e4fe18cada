"""Programs that provoke the errors of the catalogue on two ranks, and the sentences about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """One program.

    Args:
        code: cell that raises the error. `folder` is an empty folder that all ranks share.
        said: the sentence on rank 0, or on all ranks; "" if this rank has no error.
        on_1: the sentence on rank 1 if it is another one; None if it is the same.
    """

    code: str
    said: str
    on_1: str | None = None


SETUP = """import copy, datetime, gc, inspect, os, time
import torch.distributed.checkpoint as dcp
import torch.distributed.rpc as rpc
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
x, xx = torch.ones(4), torch.ones(2, 4)
last = [dist.new_group([one]) for one in (0, 1)][1]
mesh = init_device_mesh("cpu", (2,))
second = datetime.timedelta(seconds=1)
def linears(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
class Two(nn.Module):
    '''Rank 0 uses the left part, and rank 1 the right part.'''
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.left(x) if dist.get_rank() == 0 else self.right(x)
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
    def forward(self, x):
        return checkpoint(self.a, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)
class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, first):
        return self.a(x) if first else self.b(x)
class Query(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(4, 8)
    def forward(self, x):
        return self.q(x).view(2, 2, 4)
class Speaker(nn.Linear):
    def generate(self, x):
        return self.forward(x)
def pipeline(schedule=ScheduleGPipe, microbatches=2):
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    return schedule(stage, n_microbatches=microbatches, loss_fn=F.mse_loss)
def step(schedule, samples):
    return schedule.step(torch.ones(samples, 4)) if rank == 0 else schedule.step(target=torch.ones(samples, 4))
class Samples(Dataset):
    def __init__(self, get):
        self.get = get
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return self.get(index)
class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))
pairs = TensorDataset(torch.ones(4, 2))
def first(dataset, **options):
    return next(iter(DataLoader(dataset, batch_size=2, **options)))
def sleep():
    time.sleep(2)
"""

PROGRAMS = {
    "root outside the group": Program(
        "if rank == 1: dist.broadcast(x, 0, group=last)",
        "",
        "src counts the ranks of the session, and this group has [1] of them: pass src=1, or group_src=0 for the "
        "first rank of the group",
    ),
    "rank outside the group": Program(
        "if rank == 1: dist.get_group_rank(last, 0)",
        "",
        "rank 0 of the session is not in this group, which has the ranks [1]: pass one of these ranks, or call "
        "it only on them",
    ),
    "root of a group too large": Program(
        "if rank == 1: dist.broadcast(x, group_src=1, group=last)",
        "",
        "ranks within this group count from 0, and it has 1: the ranks [1] of the session: pass a number below 1, "
        "or src= or dst= with one of these",
    ),
    "two roots": Program(
        "dist.broadcast(x, 0, group_src=0)",
        "broadcast got both src, a rank of the session, and group_src, a rank within the group: pass one of them",
    ),
    "no root": Program(
        "dist.broadcast(x)",
        "broadcast needs the rank that it sends from or to: pass src=0, or another rank of the session",
    ),
    "message to itself": Program(
        "dist.send(x, rank)",
        "rank 0 passed itself as the destination of send: pass another rank, such as (rank + 1) % world_size",
        "rank 1 passed itself as the destination of send: pass another rank, such as (rank + 1) % world_size",
    ),
    "list of all_gather": Program(
        "dist.all_gather([torch.empty(4)], x)",
        "all_gather fills one tensor for each of the 2 ranks of the group, and its list has 1: pass "
        "[torch.empty_like(x) for _ in range(2)]",
    ),
    "shapes of all_gather": Program(
        "dist.all_gather([torch.empty(4), torch.empty(3)], x)",
        "tensor 1 of the list has the shape (3), and the input has (4): give all tensors the shape of the input, "
        "equal on all ranks; pad shorter inputs",
    ),
    "output of all_gather_into_tensor": Program(
        "dist.all_gather_into_tensor(torch.empty(5), x)",
        "2 ranks * 4 elements = 8, and the output has 5: make the output 2 times as large as the input in its "
        "first dimension",
    ),
    "dtype of all_gather_into_tensor": Program(
        "dist.all_gather_into_tensor(torch.empty(8).double(), x)",
        "the input is torch.float32, and the output is torch.float64: make the output with dtype=torch.float32",
    ),
    "mixed dtypes": Program(
        "dist.all_gather([torch.empty(4), torch.empty(4).int()], x)",
        "the tensors of this all_gather are torch.float32 and torch.int32: make the outputs with the dtype of "
        "the input",
    ),
    "strided message": Program(
        "dist.send(torch.ones(4, 4).T, 1 - rank)",
        "send got a view of shape [4, 4] with strides [1, 4]: send x.contiguous(), or receive into a new tensor "
        "and copy it into the view",
    ),
    "no scatter_list": Program(
        "dist.scatter(torch.empty(4), None, src=0)",
        "rank 0 is the source of this scatter, and it passed no scatter_list: pass scatter_list with one tensor "
        "for each rank on rank 0, and None on the others",
        "",
    ),
    "scatter_list on another rank": Program(
        "dist.scatter(torch.empty(4), [x, x.clone()], src=0)",
        "",
        "rank 1 passed a scatter_list, and rank 0 is the source: pass scatter_list=parts if rank == 0 else None",
    ),
    "length of scatter_list": Program(
        "dist.scatter(torch.empty(4), [x] if rank == 0 else None, src=0)",
        "scatter sends one tensor to each of the 2 ranks of the group, and scatter_list has 1: pass 2 tensors, "
        "such as list(x.chunk(2))",
        "",
    ),
    "shapes of scatter_list": Program(
        "dist.scatter(torch.empty(4), [x, torch.ones(3)] if rank == 0 else None, src=0)",
        "tensor 1 of scatter_list has the shape (3), and the output has (4): all parts have the shape of the "
        "output; pad the last one, or use scatter_object_list",
        "",
    ),
    "no gather_list": Program(
        "dist.gather(x, None, dst=0)",
        "rank 0 is the destination of this gather, and it passed no list for the results: pass a list with one "
        "entry for each rank, and None on other ranks",
        "",
    ),
    "gather_list on another rank": Program(
        "dist.gather(x, [torch.empty(4) for _ in range(2)], dst=0)",
        "",
        "rank 1 passed a list for the results of this gather, and rank 0 is the destination: pass the list if "
        "rank == 0, else None",
    ),
    "list of reduce_scatter": Program(
        "dist.reduce_scatter(torch.empty(4), [x])",
        "reduce_scatter takes one tensor for each of the 2 ranks of the group, and its list has 1: pass "
        "list(x.chunk(2)), or use reduce_scatter_tensor(output, x)",
    ),
    "sizes of reduce_scatter_tensor": Program(
        "dist.reduce_scatter_tensor(torch.empty(4), torch.ones(7))",
        "2 ranks * 4 elements = 8, and the input has 7: pad dimension 0 of the input to a multiple of 2, and make "
        "the output 1/2 of it",
    ),
    "dimension of a functional reduce_scatter": Program(
        "torch.distributed._functional_collectives.reduce_scatter_tensor(torch.ones(3), 'sum', 0, dist.group.WORLD)",
        "dimension 0 has 3 rows, which 2 ranks cannot share equally: pad it to a multiple of 2",
    ),
    "list of all_to_all": Program(
        "dist.all_to_all([torch.empty(4)], [x])",
        "all_to_all sends one tensor to each of the 2 ranks of the group, and its list has 1: pass 2 tensors in "
        "both lists",
    ),
    "sizes of all_to_all_single": Program(
        "dist.all_to_all_single(torch.empty(4), torch.ones(5))",
        "without split sizes, input and output have equal sizes, and here they have 5 and 4 elements: make the "
        "output like the input, or pass input_split_sizes and output_split_sizes",
    ),
    "number of split sizes": Program(
        "dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 2, 1], [2, 2])",
        "output_split_sizes=[1, 2, 1] has 3 numbers, and the group has 2 ranks: pass 2 numbers",
    ),
    "sum of split sizes": Program(
        "dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [1, 2])",
        "input_split_sizes=[1, 2] adds up to 3, and input has 4 rows: pass numbers that add up to 4",
    ),
    "no future": Program(
        "dist.reduce_scatter_tensor(torch.empty(2), x, async_op=True).get_future()",
        "gloo has no future for this operation; it has none for send, recv and reduce_scatter: call work.wait(), or "
        "use all_reduce and slice the result",
    ),
    "operation of a P2POp": Program(
        "dist.P2POp(dist.all_reduce, x, 1 - rank)",
        "a batch of messages consists of dist.isend and dist.irecv: pass dist.isend or dist.irecv itself, "
        "without calling it; call collectives on their own",
    ),
    "batch without P2POps": Program(
        "dist.batch_isend_irecv([(dist.isend, x, 1)])",
        "batch_isend_irecv takes a list of dist.P2POp objects: pass [dist.P2POp(dist.isend, x, peer), "
        "dist.P2POp(dist.irecv, y, peer)]",
    ),
    "empty batch": Program(
        "dist.batch_isend_irecv([])",
        "batch_isend_irecv got an empty list on this rank: call it only on ranks that have messages",
    ),
    "reduction of complex numbers": Program(
        "dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)",
        "complex numbers have no order, so only SUM, AVG and PREMUL_SUM exist for them: reduce "
        "torch.view_as_real(x), or its absolute values",
    ),
    "reduction that gloo lacks": Program(
        "dist.all_reduce(x, dist._make_nccl_premul_sum(2.0))",
        "gloo has no reduction PREMUL_SUM: multiply before or after a SUM",
    ),
    "bits of real numbers": Program(
        "dist.all_reduce(x, dist.ReduceOp.BAND)",
        "BAND works on the bits of integers, and the tensor is float32: convert it with .int() or .bool(), or "
        "use MAX, MIN or SUM",
    ),
    "dtype that gloo lacks": Program(
        "dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))",
        "gloo has no all_reduce for float8_e4m3fn: convert the tensor, for example with .float() or .int(), and "
        "convert the result back",
    ),
    "sparse tensor": Program(
        "dist.broadcast(torch.ones(4, 4).to_sparse(), 0)",
        "broadcast takes no tensor with the layout Sparse: pass x.to_dense(); all_reduce takes sparse tensors",
    ),
    "no tensor": Program(
        "dist.all_reduce([1, 2])",
        "all_reduce needs a tensor as its argument tensor, and got list: pass torch.as_tensor(value), or send "
        "Python objects with all_gather_object or broadcast_object_list",
    ),
    "no list of tensors": Program(
        "dist.all_gather(x, x)",
        "all_gather needs a list with one tensor per rank in tensor_list, and got Tensor: pass "
        "[torch.empty_like(x) for _ in range(world_size)], or use the form with _into_tensor or _tensor",
    ),
    "nothing received": Program(
        "group = dist.new_group(timeout=second)\nif rank == 0: dist.recv(x, 1, group=group)\nelse: time.sleep(2)",
        "no message of rank 1 arrived within 1 s, the timeout of the group: check that rank 1 reaches its send, "
        "or set a longer timeout in new_group",
        "",
    ),
    "message not received": Program(
        "group = dist.new_group(timeout=second)\n"
        "if rank == 0: dist.send(torch.ones(5_000_000), 1, group=group)\n"
        "else: time.sleep(2)",
        "rank 1 did not receive the message within 1 s, the timeout of the group: check that rank 1 reaches its "
        "recv, or set a longer timeout in new_group",
        "",
    ),
    "timeout of a collective": Program(
        "group = dist.new_group(timeout=second)\nif rank == 0: dist.all_reduce(x, group=group)\nelse: time.sleep(2)",
        "this all_reduce got no data from another rank of the group within 1 s: check that every rank of the "
        "group calls it, or set a longer timeout in new_group",
        "",
    ),
    "timeout of a wait": Program(
        "group = dist.new_group(timeout=second)\n"
        "if rank == 0: work = dist.irecv(x, 1, group=group); work.wait()\n"
        "else: time.sleep(2)",
        "the operation of this wait did not complete within 1 s: check that the other rank calls the matching "
        "operation, or set a longer timeout in new_group or wait()",
        "",
    ),
    "monitored barrier": Program(
        "if rank == 0: dist.monitored_barrier(timeout=second)\nelse: time.sleep(2)",
        "rank 1 did not reach monitored_barrier within 1 s: check what rank 1 does at that time, or pass a "
        "longer timeout",
        "",
    ),
    "object that cannot be pickled": Program(
        "dist.all_gather_object([None, None], lambda: 0)",
        "all_gather_object sends pickled objects, and other ranks find functions and classes only by their name: "
        "define it with def or class at the top level of a cell or module",
    ),
    "local class or function in an object": Program(
        "def make():\n    class Local: pass\n    return Local()\ndist.all_gather_object([None, None], make())",
        "all_gather_object sends pickled objects, and make.<locals>.Local is defined inside a function: define "
        "it at the top level of a cell or module",
    ),
    "list of scatter_object_list": Program(
        "dist.scatter_object_list([], [1, 2] if rank == 0 else None, src=0)",
        "scatter_object_list writes its result into the first entry of its output list: pass out = [None], and "
        "read out[0]",
    ),
    "no backend for the device": Program(
        "group = dist.new_group(backend='cuda:gloo')\ndist.all_reduce(x, group=group)",
        "the group of this all_reduce has no backend for tensors on cpu: move the tensor to the device of the "
        "group, or make the group with backend='cpu:gloo,cuda:nccl'",
    ),
    "no default group": Program(
        "dist.destroy_process_group()\ntry: dist.barrier()\nfinally: dist.init_process_group()",
        "this rank has no default group, because it was destroyed: dist.init_process_group() on all ranks forms "
        "it again",
    ),
    "default group twice": Program(
        "inspect.unwrap(dist.init_process_group)('gloo')",
        "the ranks of a session form the default group at their start: leave init_process_group out, or call "
        "destroy_process_group on all ranks before it",
    ),
    "group with too many ranks": Program(
        "dist.new_group([0, 1, 2])",
        "the group has 3 ranks [0, 1, 2], and the session has 2: use ranks from 0 to 1, or %ddp_resize 3",
    ),
    "group with an unknown rank": Program(
        "dist.new_group([0, 5])",
        "the group [0, 5] contains rank 5, and the session has 2 ranks: use ranks from 0 to 1",
    ),
    "rank twice in a group": Program(
        "dist.new_group([0, 0])",
        "[0, 0] contains a rank twice: pass each rank once, for example sorted(set(ranks))",
    ),
    "something else as a group": Program(
        "dist.all_reduce(x, group='tp')",
        "group=tp is no process group: pass the return value of dist.new_group, or mesh.get_group()",
    ),
    "destroyed group": Program(
        "group = dist.new_group()\ndist.destroy_process_group(group)\ndist.get_backend(group)",
        "torch does not know this process group any more, as after destroy_process_group(group): call "
        "g = dist.new_group(ranks) on all ranks again, and pass group=g",
    ),
    "list as a group": Program(
        "dist.all_reduce(x, group=[0, 1])",
        "group= got a list of ranks instead of a process group: call g = dist.new_group(ranks) once on all "
        "ranks, and pass group=g",
    ),
    "backend that torch lacks": Program(
        "dist.new_group(backend='mpi')",
        "torch VERSION is built without MPI: use backend='gloo' for CPU ranks, or a build of torch with CUDA for NCCL",
    ),
    "unknown backend": Program(
        "dist.new_group(backend='fast')",
        "no backend has the name fast: use gloo or nccl, or dist.Backend.register_backend for another one",
    ),
    "names of mesh dimensions": Program(
        "init_device_mesh('cpu', (2,), mesh_dim_names=('dp', 'tp'))",
        "the mesh has 1 dimensions and 2 names: give one name for each number of mesh_shape",
    ),
    "part of a mesh without names": Program(
        "mesh['tp']",
        "the dimensions of this mesh have no names: pass mesh_dim_names to init_device_mesh, such as ('dp', 'tp')",
    ),
    "mesh of one device": Program(
        "init_device_mesh('cpu:0', (2,))",
        "a mesh needs the type of the devices, and cpu:0 is one device: pass device.type, which is 'cpu' or 'cuda'",
    ),
    "group of a mesh with several dimensions": Program(
        "init_device_mesh('cpu', (2, 1)).get_group()",
        "a mesh with 2 dimensions has a group for each of them: pass the dimension, as in mesh.get_group('dp') "
        "or mesh.get_group(0)",
    ),
    "missing key of a store": Program(
        "store = TCPStore('127.0.0.1', 0, is_master=True, timeout=second)\nstore.get('weights')",
        "no rank has set the key weights of this store within 1 s: call store.set with this key on one rank, or "
        "pass a longer timeout",
    ),
    "used port": Program(
        "store = TCPStore('127.0.0.1', 0, is_master=True)\nTCPStore('127.0.0.1', store.port, is_master=True)",
        "another process, or an earlier store of this one, uses port PORT of this host: use port 0 for a free one, "
        "and send store.port to the other ranks",
    ),
    "unreachable store": Program(
        "TCPStore('127.0.0.1', 1, is_master=False, timeout=second)",
        "no store answers at 127.0.0.1:1 within 1 s: start the store there with is_master=True before its "
        "clients, and check host name and firewall",
    ),
    "a step while gradients are off": Program(
        "torch.set_grad_enabled(False)\nTwo()(xx).sum().backward()",
        "gradients are off on this rank, since torch.set_grad_enabled(False) or an open no_grad(): call "
        "torch.set_grad_enabled(True), and use `with torch.no_grad():` for evaluation",
    ),
    "a step in a function without gradients": Program(
        "@torch.no_grad()\ndef train(): Two()(xx).sum().backward()\ntrain()",
        "backward() ran in a function with the decorator torch.no_grad: leave the decorator out for functions that "
        "train",
    ),
    "parameters replaced after DDP": Program(
        "class Both(Two):\n    def forward(self, x): return self.left(x) + self.right(x)\n"
        "model = DDP(Both())\nmodel.module.right = nn.Linear(2, 2)\nmodel(xx).sum().backward()\nmodel(xx)",
        "right.* were replaced after DDP(model), which still waits for gradients of the old ones: make the DDP model "
        "after the last change of the model",
    ),
    "unused parameters": Program(
        "model = DDP(Two())\nmodel(xx).sum().backward()\nmodel(xx)",
        "right.* got no gradient on rank 0 in the last backward of this model: use them in the loss, freeze them "
        "before DDP(model), or pass find_unused_parameters=True to DDP",
        "left.* got no gradient on rank 1 in the last backward of this model: use them in the loss, freeze them "
        "before DDP(model), or pass find_unused_parameters=True to DDP",
    ),
    "backward past the outputs": Program(
        "class Both(Two):\n    def forward(self, x): return self.left(x) + self.right(x)\n"
        "model = DDP(Both(), find_unused_parameters=True)\nmodel(xx)\n"
        "model.module.left(xx).sum().backward()\nmodel(xx)",
        "right.* got no gradient on rank 0 in the last backward of this model, but its outputs depend on them: "
        "compute the loss from the outputs, and call backward() without inputs=",
        "right.* got no gradient on rank 1 in the last backward of this model, but its outputs depend on them: "
        "compute the loss from the outputs, and call backward() without inputs=",
    ),
    "checkpointed twice in one backward": Program(
        "model = DDP(Twice(), find_unused_parameters=True)\nmodel(xx.clone().requires_grad_()).sum().backward()",
        "checkpoint(..., use_reentrant=True) runs a backward within the backward, in which DDP counted the "
        "gradient of a.bias twice: pass use_reentrant=False to checkpoint",
    ),
    "no parameter to train": Program(
        "DDP(nn.Linear(4, 4).requires_grad_(False))",
        "all 2 parameters of this Linear are frozen, so DDP has no gradient to average: use the module without DDP, "
        "or call requires_grad_(True) on parameters before DDP(model)",
    ),
    "several device_ids": Program(
        "DDP(linears(4, 4), device_ids=[0, 1])",
        "each rank is one process with one device, and device_ids has 2 entries: pass device_ids=[device.index] "
        "on GPUs, and leave it out on CPUs",
    ),
    "device_ids of a model on the CPU": Program(
        "DDP(linears(4, 4), device_ids=[rank])",
        "the model is on the CPU, and device_ids is for models on GPUs: leave device_ids and output_device out, "
        "or call model.to(device) where device is a GPU",
    ),
    "model on several kinds of devices": Program(
        "model = linears(4, 4, 4)\nmodel[1].to('meta')\nDDP(model)",
        "the parameters are on several kinds of devices (0.* on cpu; 1.* on meta): call model.to(device), or "
        "model.to_empty(device=device) for parameters on meta, before DDP(model)",
    ),
    "lazy parameters": Program(
        "DDP(nn.Sequential(nn.LazyLinear(4)))",
        "0.weight and 0.bias of a lazy module have no shape yet: call the model once on a batch, on all ranks, "
        "before DDP(model)",
    ),
    "models with different numbers of parameters": Program(
        "DDP(linears(4, 4) if rank else linears(4, 4, 4))",
        "the model has 4 parameters that require gradients on rank 0, and 2 on rank 1: build the same model and "
        "freeze the same parameters on all ranks",
        "the model has 2 parameters that require gradients on rank 1, and 4 on rank 0: build the same model and "
        "freeze the same parameters on all ranks",
    ),
    "models with different shapes": Program(
        "DDP(linears(4, 4) if rank else linears(4, 5))",
        "",
        "0.weight has the shape [4, 4] on rank 1, and another one on rank 0: use the same sizes on all ranks, also "
        "if they depend on data",
    ),
    "attribute of the inner model": Program(
        "DDP(Two()).left",
        "left belongs to the Two inside DDP: write model.module.left; train with model(...) itself, so that "
        "gradients are averaged",
    ),
    "state_dict of a wrapped model": Program(
        "Two().load_state_dict(DDP(Two()).state_dict())",
        "the keys start with module., as those of a model in DDP: load "
        "{k.removeprefix('module.'): v for k, v in state.items()}, or save the inner model",
    ),
    "state_dict of a model that is not wrapped": Program(
        "DDP(Two()).load_state_dict(Two().state_dict())",
        "this model is a model in DDP, and these keys lack module.: call model.module.load_state_dict(state)",
    ),
    "changed static graph": Program(
        "model = DDP(Turns(), static_graph=True)\n"
        "for is_first in (True, True, False): model(xx, is_first).sum().backward()",
        "DDP(static_graph=True) requires the same used parameters in each step, and this step used others: pass "
        "find_unused_parameters=True instead of static_graph=True",
    ),
    "DDP of a sharded model": Program(
        "DDP(fully_shard(linears(4, 4)))",
        "this model is sharded already, and DDP copies whole models: leave DDP out; for replicas of shards pass "
        "a mesh of two dimensions to fully_shard",
    ),
    "DDP of a model on meta": Program(
        "DDP(linears(4, 4).to('meta'))",
        "the parameters of this model are on meta and have no values: call model.to_empty(device=device) and "
        "initialize the model before DDP(model)",
    ),
    "dtypes of a sharded module": Program(
        "model = linears(4, 4, 4)\nmodel[1].double()\nfully_shard(model)(xx)",
        "one call of fully_shard takes parameters of one dtype, and these have several (0.*: float32; 1.*: "
        "float64): convert the model to one dtype, or call fully_shard separately on the modules with another one",
    ),
    "module called before its root": Program(
        "model = linears(4, 4, 4)\nfully_shard(model[0])(xx)\nfully_shard(model)(xx)",
        "module 0 was called before the model that contains it, so it became a root: after all calls of "
        "fully_shard, call the whole model before any part of it",
    ),
    "sharded from the outside to the inside": Program(
        "model = fully_shard(linears(4, 4, 4))\nfully_shard(model[1])",
        "a module that contains this one was sharded before, with the parameters of this one: make the model again, "
        "and call fully_shard on inner modules first, on the model last",
    ),
    "gradients partly sharded": Program(
        "model = linears(4, 4, 4)\n"
        "fully_shard(model[0])\n"
        "model(xx).sum().backward()\n"
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "2 parameters with gradients are DTensors, and 1.* not: call fully_shard or parallelize_module on the "
        "whole model, or clip the two kinds separately",
    ),
    "optimizer with partly sharded parameters": Program(
        "model = linears(4, 4, 4)\n"
        "fully_shard(model[0])\n"
        "optimizer = torch.optim.Adam(model.parameters(), foreach=True)\n"
        "model(xx).sum().backward()\n"
        "optimizer.step()",
        "2 parameters of this optimizer are DTensors, and 1.* not: shard the whole model before the optimizer is "
        "made, or use foreach=False",
    ),
    "optimizer with whole state": Program(
        "model = fully_shard(linears(4, 4))\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "model(xx).sum().backward()\n"
        "optimizer.step()\n"
        "for state in optimizer.state.values(): state['exp_avg'] = state['exp_avg'].full_tensor()\n"
        "optimizer.step()",
        "the parameters of this Adam are sharded, and its state exp_avg is not: load its state with "
        "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
    ),
    "whole state_dict into a sharded model": Program(
        "state = linears(4, 4).state_dict()\nfully_shard(linears(4, 4)).load_state_dict(state)",
        "this Sequential is sharded, and the state_dict has whole tensors: use set_model_state_dict(model, "
        "state, options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict, or "
        "load before the model is sharded",
    ),
    "sharded state_dict into a whole model": Program(
        "linears(4, 4).load_state_dict(fully_shard(linears(4, 4)).state_dict())",
        "the state_dict is of a sharded model, and this Sequential is not sharded: gather it on all ranks with "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
        "torch.distributed.checkpoint.state_dict",
    ),
    "method of a sharded model": Program(
        "fully_shard(Speaker(4, 4)).generate(xx)",
        "fully_shard gathers parameters when the Speaker itself is called, and generate was called instead: call "
        "model(...), or register_fsdp_forward_method(model, 'generate') before",
    ),
    "whole input of a sharded module": Program(
        "layer = nn.Linear(4, 4)\n"
        "layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, mesh, [Shard(0)]))\n"
        "layer(xx)",
        "the parameters of this Linear are DTensors, and its input is a plain tensor: after fully_shard call the "
        "model that contains it; for tensor parallel use parallelize_module, which converts inputs",
    ),
    "plain tensor with a DTensor": Program(
        "distribute_tensor(x, mesh, [Shard(0)]) + x",
        "one operand of add.Tensor is a DTensor, and another one a plain tensor: convert one of them: "
        "distribute_tensor(x, d.device_mesh, d.placements), or d.full_tensor() on all ranks",
    ),
    "module without a forward": Program(
        "fully_shard(nn.ModuleList([nn.Linear(4, 4)]))",
        "ModuleList defines no forward, before which fully_shard could gather its parameters: call fully_shard on "
        "each of its modules, and on the model that contains it",
    ),
    "sharded twice": Program(
        "model = fully_shard(linears(4, 4))\nfully_shard(model)",
        "fully_shard was called on this Sequential before, perhaps by an earlier run of the cell: make the model "
        "in the same cell, before fully_shard",
    ),
    "mesh with three dimensions": Program(
        "fully_shard(linears(4, 4), mesh=init_device_mesh('cpu', (1, 1, 2)))",
        "fully_shard shards over one dimension of a mesh, and copies over a second one: pass a part of the mesh, "
        "such as mesh['dp'] or mesh['replicate', 'shard']",
    ),
    "uneven shards of another dimension": Program(
        "fully_shard(nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(p.dim() - 1))",
        "dimension 1 of [4, 3] has no equal parts for 2 ranks; only dimension 0 may have unequal ones: use "
        "Shard(0), or pad dimension 1 to a multiple of 2",
    ),
    "ranks per group after the forward": Program(
        "fully_shard(linears(4, 4), reshard_after_forward=3)",
        "reshard_after_forward=3 is the number of ranks that hold the model after a forward, and 3 does not "
        "divide 2 ranks: pass a divisor of 2, or True or False",
    ),
    "FullyShardedDataParallel on CPU ranks": Program(
        "from torch.distributed.fsdp import FullyShardedDataParallel\nFullyShardedDataParallel(linears(4, 4))",
        "FullyShardedDataParallel of this torch needs GPUs, and these ranks have none: use fully_shard(model), "
        "which works on CPU ranks",
    ),
    "copy of a sharded model": Program(
        "copy.deepcopy(fully_shard(linears(4, 4)))",
        "the model was copied with deepcopy after fully_shard: copy it before fully_shard, and shard the copy "
        "too; for an average of weights, average the DTensors of both",
    ),
    "operator without sharding": Program(
        "d = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])\ntorch.cdist(d, d)",
        "torch has no rule for aten._cdist_forward.default on shards: call it on d.full_tensor(), which all "
        "ranks gather, or on d.to_local() if each shard can be treated alone",
    ),
    "operands on different meshes": Program(
        "other = init_device_mesh('cpu', (2, 1))\n"
        "distribute_tensor(x, mesh, [Shard(0)]) + distribute_tensor(x, other, [Shard(0), Replicate()])",
        "the operands of aten.add.Tensor are on two meshes, DeviceMesh((2,), 'cpu', stride=(1,)) and DeviceMesh((2, "
        "1), 'cpu', stride=(1, ())): use one mesh for both tensors, or parts of it",
    ),
    "view of uneven shards": Program(
        "distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)]).view(12)",
        "3 rows in dimension 0 have no equal parts for 2 ranks, and this view needs equal parts: call "
        "d.redistribute(placements=[Replicate()]) before, or pad to a multiple of 2",
    ),
    "change to partial sums": Program(
        "distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).redistribute(mesh, [Partial()])",
        "a tensor becomes a partial sum only as the result of an operation: use Replicate() or Shard(dim), or "
        "DTensor.from_local(x, mesh, [Partial()]) for sums of your own",
    ),
    "part of a columnwise output": Program(
        "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))\n"
        "parallelize_module(model, mesh, {'0': ColwiseParallel()})(xx)",
        "module 0 is columnwise parallel and gives 4 of its 8 features on each of 2 ranks, and module 2 needs "
        "all: pass ColwiseParallel(output_layouts=Replicate()) for 0, or make 2 RowwiseParallel",
    ),
    "part of a columnwise output in another columnwise module": Program(
        "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))\n"
        "parallelize_module(model, mesh, {'0': ColwiseParallel(), '2': ColwiseParallel()})(xx)",
        "module 0 is columnwise parallel and gives 4 of its 8 features on each of 2 ranks, and module 2 needs "
        "all: pass ColwiseParallel(output_layouts=Replicate()) for 0, or make 2 RowwiseParallel",
    ),
    "columnwise output in a norm": Program(
        "model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))\n"
        "parallelize_module(model, mesh, {'0': ColwiseParallel()})(xx)",
        "module 0 is columnwise parallel and gives 4 of its 8 features on each of 2 ranks, and module 1 needs "
        "all: pass ColwiseParallel(output_layouts=Replicate()) for 0",
    ),
    "view of a columnwise output": Program(
        "parallelize_module(Query(), mesh, {'q': ColwiseParallel()})(xx)",
        "module q is columnwise parallel, so each rank has 1/2 of its features, and the view expects all: divide "
        "the heads by 2 in the view, or pass ColwiseParallel(output_layouts=Replicate())",
    ),
    "whole input of a rowwise module": Program(
        "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))\n"
        "parallelize_module(model, mesh, {'2': RowwiseParallel()})(xx)",
        "module 2 is rowwise parallel, so each of 2 ranks passes 1/2 of its 8 inputs, and here each passed all: "
        "make the module before it ColwiseParallel, or pass RowwiseParallel(input_layouts=Replicate())",
    ),
    "parallel style of another module": Program(
        "parallelize_module(nn.Sequential(nn.Conv2d(1, 2, 3)), mesh, {'0': ColwiseParallel()})",
        "ColwiseParallel splits nn.Linear and nn.Embedding, and this module is Conv2d: leave it out of the plan, "
        "or use SequenceParallel for norms and dropouts",
    ),
    "tensor parallel on a whole mesh": Program(
        "parallelize_module(linears(4, 4), init_device_mesh('cpu', (1, 2)), {'0': ColwiseParallel()})",
        "parallelize_module takes a mesh of one dimension, and this one has the shape [1, 2]: pass the dimension "
        "for tensor parallel, such as mesh['tp']",
    ),
    "logits for loss_parallel": Program(
        "logits = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])\n"
        "with loss_parallel(): F.cross_entropy(logits, torch.tensor([0, 1, 2, 3]))",
        "loss_parallel needs logits that are sharded by classes, Shard(1), and these are (Shard(dim=0),): pass "
        "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False) for the last layer",
    ),
    "DTensor as a local tensor": Program(
        "DTensor.from_local(distribute_tensor(x, mesh, [Shard(0)]), mesh, [Shard(0)])",
        "DTensor.from_local got a DTensor, and it takes the part of one rank: use d.redistribute(mesh, "
        "placements) for another placement",
    ),
    "fewer microbatches than stages": Program(
        "pipeline(Schedule1F1B, 1)",
        "Schedule1F1B keeps 2 stages busy at the same time, and n_microbatches=1 is less: pass n_microbatches=2 "
        "or more, or use ScheduleGPipe",
    ),
    "batch of another size": Program(
        "schedule = pipeline()\nstep(schedule, 4)\nstep(schedule, 2)",
        "microbatches have 1 samples in this step, and the stages keep the first size, 2: pass drop_last=True to "
        "the DataLoader, or make stages and schedule again for another batch size",
        "",
    ),
    "number of a stage": Program(
        "PipelineStage(nn.Linear(4, 4), 2, 2, torch.device('cpu'))",
        "stage 2 does not exist in a pipeline of 2 stages: use numbers from 0 to 1, and pass the number of all "
        "stages on all ranks as num_stages",
    ),
    "no target in the last stage": Program(
        "schedule = pipeline()\nschedule.step(torch.ones(4, 4)) if rank == 0 else schedule.step()",
        "",
        "stage 1 is the last one, and it needs a loss_fn in the schedule and a target in step(): call "
        "schedule.step(target=y) on its rank, or schedule.eval() without a backward",
    ),
    "no batch in the first stage": Program(
        "schedule = pipeline()\nschedule.step() if rank == 0 else schedule.step(target=torch.ones(4, 4))",
        "stage 0 is the first one and takes the batch, and step() got none: call schedule.step(x) on the rank of "
        "stage 0",
        "",
    ),
    "pipeline without gradients": Program(
        "with torch.no_grad(): step(pipeline(), 4)",
        "step() runs forward and backward, and gradients are switched off here: call schedule.eval(x) within "
        "torch.no_grad(), or leave no_grad out",
    ),
    "key with a prefix in the checkpoint": Program(
        "dcp.save({'model': linears(4, 4).state_dict()}, checkpoint_id=folder)\n"
        "dcp.load(linears(4, 4).state_dict(), checkpoint_id=folder)",
        "the checkpoint has model.0.bias, and not 0.bias: load it inside a dictionary, dcp.load({'model': state}, ...)",
    ),
    "key that the checkpoint lacks": Program(
        "dcp.save({'x': x}, checkpoint_id=folder)\n"
        "dcp.load({'x': x, **({'y': x} if rank else {})}, checkpoint_id=folder)",
        "y is in the state_dict of rank 1 and not in the checkpoint; it has x: load a state_dict with the saved "
        "keys, or pass planner=DefaultLoadPlanner(allow_partial_load=True)",
    ),
    "tensor of another size in the checkpoint": Program(
        "dcp.save({'x': x}, checkpoint_id=folder)\ndcp.load({'x': torch.ones(3)}, checkpoint_id=folder)",
        "x has the shape [4] in the checkpoint and [3] in the state_dict: make the model with the saved sizes; only "
        "the number of ranks may differ",
    ),
    "value of another kind in the checkpoint": Program(
        "dcp.save({'x': x}, checkpoint_id=folder)\ndcp.load({'x': 1}, checkpoint_id=folder)",
        "x is a tensor in only one of checkpoint and state_dict (expected BytesStorageMetadata, found "
        "TensorStorageMetadata): put a value of the saved kind into the state_dict before dcp.load",
    ),
    "file instead of a checkpoint's folder": Program(
        "if rank == 0: torch.save({'x': x}, f'{folder}.pt')\n"
        "dist.barrier()\n"
        "dcp.load({'x': x}, checkpoint_id=f'{folder}.pt')",
        "FOLDER.pt is a file, and dcp.load reads folders that dcp.save has written: use torch.load for a file of "
        "torch.save",
    ),
    "folder without a checkpoint": Program(
        "os.makedirs(f'{folder}/empty', exist_ok=True)\ndcp.load({'x': x}, checkpoint_id=f'{folder}/empty')",
        "FOLDER/empty exists and has no .metadata, the file that dcp.save writes last: load an earlier "
        "checkpoint if that save was interrupted, or pass the folder of the checkpoint itself",
    ),
    "missing folder of a checkpoint": Program(
        "dcp.load({'x': x}, checkpoint_id=f'{folder}/step_7')",
        "the folder FOLDER/step_7 does not exist on this rank's host; the rank runs in CWD: check the path; several "
        "hosts need a shared file system",
    ),
    "checkpoint's folder in torch.load": Program(
        "dcp.save({'x': x}, checkpoint_id=folder)\ntorch.load(folder)",
        "FOLDER is a checkpoint of torch.distributed.checkpoint: use dcp.load(state, checkpoint_id='FOLDER') "
        "with a state_dict of the right shapes",
    ),
    "checkpoint without a path": Program(
        "dcp.save({'x': x})",
        "save and load need a folder: pass checkpoint_id='path/of/a/folder', the same on all ranks",
    ),
    "optimizer of another model": Program(
        "saved = torch.optim.Adam(linears(4, 4, 4).parameters()).state_dict()\n"
        "torch.optim.Adam(linears(4, 4).parameters()).load_state_dict(saved)",
        "a group of this optimizer has 2 parameters, and the saved one has 4: make the optimizer from the same "
        "parameters in the same groups as the saved one",
    ),
    "RPC before init_rpc": Program(
        "rpc.rpc_sync('worker1', sleep)",
        "this rank has no RPC worker: it never called init_rpc, or it called shutdown: call "
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size) on all ranks",
    ),
    "timeout of a call": Program(
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
        "try:\n"
        "    if rank == 0: rpc.rpc_sync('worker1', sleep, timeout=1)\n"
        "finally: rpc.shutdown()",
        "the called function did not return within 1 s; it may still run on the other worker: pass a longer "
        "timeout to the call, or timeout=0 for none",
        "",
    ),
    "worker that has exited": Program(
        "first(Samples(lambda index: os._exit(1)), num_workers=1)",
        "a worker process of this DataLoader has ended, often because of missing memory or an error at its start: "
        "use fewer workers, or num_workers=0 to see the error",
    ),
    "timeout of a loader": Program(
        "first(Samples(lambda index: time.sleep(3)), num_workers=1, timeout=1)",
        "no worker of this DataLoader finished a batch within 1 s: pass a longer timeout, or more workers; "
        "timeout=0 waits without a limit",
    ),
    "samples of different shapes": Program(
        "first(Samples(lambda index: torch.ones(index + 1)))",
        "samples 0 and 1 of a batch have tensors of the shapes [1] and [2], and default_collate stacks them: pad "
        "them in the dataset, or in collate_fn with torch.nn.utils.rnn.pad_sequence",
    ),
    "lists of different lengths": Program(
        "first(Samples(lambda index: [1] * (index + 1)))",
        "the samples of a batch are lists of different lengths, and default_collate needs equal ones: pad them "
        "in the dataset, or pass collate_fn=list to keep them as they are",
    ),
    "samples that are nothing": Program(
        "first(Samples(lambda index: None))",
        "a sample of this batch is None or contains None: return a value in each branch of __getitem__, or pass "
        "a collate_fn that skips None",
    ),
    "samples that cannot be stacked": Program(
        "first(Samples(lambda index: object()))",
        "the samples are or contain objects of the class object, which default_collate cannot stack: convert "
        "them to tensors in __getitem__, or pass collate_fn=list",
    ),
    "shuffle with a DistributedSampler": Program(
        "DataLoader(pairs, sampler=DistributedSampler(pairs), shuffle=True)",
        "a DistributedSampler decides the order of the samples: leave shuffle out here, pass shuffle=True to "
        "DistributedSampler, and call set_epoch(epoch) in each epoch",
    ),
    "shuffle with a sampler": Program(
        "DataLoader(pairs, sampler=[0, 1], shuffle=True)",
        "a sampler already decides the order of the samples: leave shuffle out, and shuffle in the sampler",
    ),
    "batch_sampler with other options": Program(
        "DataLoader(pairs, batch_sampler=BatchSampler(DistributedSampler(pairs), 2, False), batch_size=2)",
        "a batch_sampler already decides which samples are in which batch: leave batch_size, shuffle, sampler "
        "and drop_last out, and pass them to the batch sampler",
    ),
    "shuffle of an IterableDataset": Program(
        "DataLoader(Stream(), shuffle=True)",
        "an IterableDataset decides the order of its samples itself: leave shuffle out, and shuffle in __iter__",
    ),
    "sampler of an IterableDataset": Program(
        "DataLoader(Stream(), sampler=DistributedSampler(pairs))",
        "an IterableDataset has no index, so a sampler cannot choose its samples: leave sampler out, and give "
        "each rank its part in __iter__, such as islice(samples, rank, None, world_size)",
    ),
    "rank of a sampler": Program(
        "DistributedSampler(pairs, num_replicas=2, rank=2)",
        "rank=2 does not exist among num_replicas=2; the session has 2 ranks: leave num_replicas and rank out: "
        "DistributedSampler takes them from the default group",
    ),
    "empty dataset": Program(
        "DataLoader([], shuffle=True)",
        "the dataset, a list, has no samples on this rank: check the path or the filter of the data on this "
        "rank; without shuffle an empty dataset gives no batch",
    ),
    "length of an IterableDataset": Program(
        "DistributedSampler(Stream())",
        "DistributedSampler needs the number of samples, and Stream has no len(): define __len__, or for an "
        "IterableDataset leave the sampler out and give each rank its part in __iter__",
    ),
    "iterator as a dataset": Program(
        "first(one for one in range(3))",
        "DataLoader needs the number of samples here, and generator has no len(): pass a list or a Dataset with "
        "__len__ and __getitem__, or wrap a stream in an IterableDataset",
    ),
    "lengths of a split": Program(
        "torch.utils.data.random_split(pairs, [3, 3])",
        "[3, 3] adds up to 6, and the dataset has 4 samples: pass numbers that add up to 4, or fractions that "
        "add up to 1, such as [0.8, 0.2]",
    ),
    "prefetch without workers": Program(
        "DataLoader(pairs, prefetch_factor=2)",
        "only worker processes load batches ahead, and num_workers is 0: pass num_workers=1 or more, or leave "
        "prefetch_factor out",
    ),
}

# The programs of `make test`; the others are long.
QUICK = (
    "root outside the group",
    "list of all_gather",
    "scatter_list on another rank",
    "missing key of a store",
    "unused parameters",
    "attribute of the inner model",
    "whole state_dict into a sharded model",
    "part of a columnwise output",
    "key that the checkpoint lacks",
    "samples of different shapes",
    "shuffle with a DistributedSampler",
)
