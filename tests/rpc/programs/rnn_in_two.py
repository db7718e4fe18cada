"""An RNN whose embedding and decoder are on another rank: one backward and one optimizer for both ranks."""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

TOKENS, WIDTH = 11, 6


def _call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method, rref, *args, **kwargs):
    return rpc.rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


def _parameter_rrefs(module):
    return [RRef(parameter) for parameter in module.parameters()]


class EmbeddingTable(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.encoder = nn.Embedding(tokens, width)
        nn.init.normal_(self.encoder.weight, generator=torch.Generator().manual_seed(1))

    def forward(self, x):
        return self.encoder(x)


class Decoder(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.decoder = nn.Linear(width, tokens)
        nn.init.normal_(self.decoder.weight, generator=torch.Generator().manual_seed(2))
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x):
        return self.decoder(x)


class RNNModel(nn.Module):
    def __init__(self, server):
        super().__init__()
        self.table_rref = rpc.remote(server, EmbeddingTable, args=(TOKENS, WIDTH))
        torch.manual_seed(3)
        self.rnn = nn.LSTM(WIDTH, WIDTH)
        self.decoder_rref = rpc.remote(server, Decoder, args=(TOKENS,), kwargs={"width": WIDTH})

    def forward(self, x, hidden):
        embedded = _remote_method(EmbeddingTable.forward, self.table_rref, x)
        output, hidden = self.rnn(embedded, hidden)
        return _remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self):
        of_table = _remote_method(_parameter_rrefs, self.table_rref)
        return [*of_table, *_parameter_rrefs(self.rnn), *_remote_method(_parameter_rrefs, self.decoder_rref)]


def _run_trainer():
    model = RNNModel("parameter_server")
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
    hidden = (torch.zeros(1, 4, WIDTH), torch.zeros(1, 4, WIDTH))
    text = (torch.arange(41).view(-1, 1) * torch.tensor([1, 2, 3, 5])) % TOKENS  # four columns, each with a step
    for start in range(0, 40, 10):
        with dist_autograd.context() as context:
            hidden = tuple(one.detach() for one in hidden)
            output, hidden = model(text[start : start + 10], hidden)
            loss = nn.functional.cross_entropy(output.flatten(0, 1), text[start + 1 : start + 11].flatten())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            gradients = dist_autograd.get_gradients(context)
        print(loss.item().hex(), gradients[model.rnn.weight_hh_l0].sum().item().hex())


def run_worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"
    if rank == 1:
        rpc.init_rpc("trainer", rank=rank, world_size=world_size)
        _run_trainer()
    else:
        rpc.init_rpc("parameter_server", rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    world_size = 2
    mp.spawn(run_worker, args=(world_size,), nprocs=world_size)
