"""A parameter server waits for the gradients of all trainers, takes one step, and answers all trainers at once."""

import os
import threading

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slope, self.height = torch.nn.Parameter(torch.zeros(())), torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.slope * x + self.height


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size):
        self.model, self.lock = Line(), threading.Lock()
        self.future_model = torch.futures.Future()
        self.batch_update_size, self.curr_update_size = batch_update_size, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, gradients):
        self = ps_rref.local_value()
        with self.lock:
            self.curr_update_size += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient
            future = self.future_model
            if self.curr_update_size >= self.batch_update_size:
                for parameter in self.model.parameters():
                    parameter.grad /= self.batch_update_size
                self.curr_update_size = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result(self.model)
                self.future_model = torch.futures.Future()
        return future


class Trainer:
    def __init__(self, ps_rref):
        self.ps_rref, self.rank = ps_rref, rpc.get_worker_info().id
        self.chance = torch.Generator().manual_seed(self.rank)

    def train(self):
        model = self.ps_rref.rpc_sync().get_model()
        for _ in range(4):
            x = torch.rand(16, generator=self.chance)
            loss = (model(x) - (3 * x - 1)).square().mean()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            update = BatchUpdateParameterServer.update_and_fetch_model
            model = rpc.rpc_sync(self.ps_rref.owner(), update, args=(self.ps_rref, gradients))
            print(loss.item().hex(), *(p.item().hex() for p in model.parameters()))


def run_trainer(ps_rref):
    Trainer(ps_rref).train()


def run_ps(trainers):
    ps_rref = rpc.RRef(BatchUpdateParameterServer(len(trainers)))
    torch.futures.wait_all([rpc.rpc_async(trainer, run_trainer, args=(ps_rref,)) for trainer in trainers])
    print(*(p.item().hex() for p in ps_rref.local_value().model.parameters()))


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=60)
    rpc.init_rpc(f"trainer{rank}" if rank else "ps", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        run_ps([f"trainer{other}" for other in range(1, world_size)])
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 3
    mp.spawn(run_worker, args=(world_size,), nprocs=world_size)
