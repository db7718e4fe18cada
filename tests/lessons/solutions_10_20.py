"""Solutions of the puzzles of lessons 10 to 20. The ranks run them, with their own `torch`, `dist` and `rank`."""

from __future__ import annotations


def one_by_one(ask, questions):
    return torch.cat([ask(question[None]).wait() for question in questions])


def two_batches(ask, questions):
    return torch.cat(torch.futures.wait_all([ask(some) for some in questions.split(16)]))


def whole_table(rows, values):
    owner = world_size - 1
    gradient = torch.zeros(1000, 16).index_add(0, rows, values)
    dist.reduce(gradient, dst=owner)
    return gradient if rank == owner else None


def only_rows(rows, values):
    owner = world_size - 1
    if rank < owner:
        dist.send(rows, owner)
        dist.send(values, owner)
        return None
    gradient = torch.zeros(1000, 16).index_add(0, rows, values)
    for source in range(owner):
        of_rank, numbers = torch.empty_like(rows), torch.empty_like(values)
        dist.recv(of_rank, source)
        dist.recv(numbers, source)
        gradient.index_add_(0, of_rank, numbers)
    return gradient


def gpipe(rank, n, m):
    return [f"F{k}" for k in range(m)] + [f"B{k}" for k in range(m)]


def one_f_one_b(rank, n, m):
    filling = n - rank
    turns = [one for k in range(m - filling) for one in (f"B{k}", f"F{filling + k}")]
    return [f"F{k}" for k in range(filling)] + turns + [f"B{k}" for k in range(m - filling, m)]


def replicated_step(network, x):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def sharded_step(network, x):
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    model = network()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    loss = x.square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def all_tokens(x_piece, w_piece):
    summand = x_piece @ w_piece
    dist.all_reduce(summand)
    return summand.chunk(world_size)[rank]


def own_tokens(x_piece, w_piece):
    summand = x_piece @ w_piece
    rows = torch.empty(len(summand) // world_size, summand.shape[1], dtype=summand.dtype)
    dist.reduce_scatter_tensor(rows, summand)
    return rows


def over_all_ranks(x, in_row, in_column):
    dist.all_reduce(x)
    return x


def in_two_levels(x, in_row, in_column):
    part = x.new_empty(len(x) // dist.get_world_size(in_row))
    dist.reduce_scatter_tensor(part, x, group=in_row)
    dist.all_reduce(part, group=in_column)
    dist.all_gather_into_tensor(x, part, group=in_row)
    return x


def four_messages(model, batches):
    for inputs, wanted in batches:
        (torch.nn.functional.cross_entropy(model(inputs), wanted) / 4).backward()
    return model.module[0].weight.grad


def one_small_message(model, batches):
    from contextlib import nullcontext

    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)
    for k, (inputs, wanted) in enumerate(batches):
        with model.no_sync() if k < 3 else nullcontext():
            (torch.nn.functional.cross_entropy(model(inputs), wanted) / 4).backward()
    return model.module[0].weight.grad


def whole_share(model, loss_of, x, wanted):
    loss_of(model, x, wanted).backward()
    return model.module[-1].weight.grad


def in_parts(model, loss_of, x, wanted):
    from contextlib import nullcontext

    for k, (some, wanted_of_some) in enumerate(zip(x.chunk(8), wanted.chunk(8), strict=True)):
        with nullcontext() if k == 7 else model.no_sync():
            (loss_of(model, some, wanted_of_some) / 8).backward()
    return model.module[-1].weight.grad


def saved_by_rank_0(model, optimizer, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    parameters, averages = get_state_dict(model, optimizer, options=whole)
    if rank == 0:
        dcp.save({"model": parameters, "optimizer": averages}, checkpoint_id=folder, no_dist=True)


def saved_by_all(model, optimizer, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parameters, averages = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": averages}, checkpoint_id=folder)


def saved_seldom(machine, steps):
    while machine.step < steps:
        if not machine.train():
            machine.restart()
        elif machine.step % 200 == 0:
            machine.save()


def saved_in_time(machine, steps):
    while machine.step < steps:
        if not machine.train():
            machine.restart()
        elif machine.step - machine.saved >= (2 * 3 * 100) ** 0.5:
            machine.save()


def five_messages(network, x, y):
    torch.nn.functional.cross_entropy(network(x), y, reduction="sum").backward()
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)
    for parameter in network.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= count
    return [parameter.grad for parameter in network.parameters()]


def one_message(network, x, y):
    torch.nn.functional.cross_entropy(network(x), y, reduction="sum").backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    flat = torch.cat([*[one.flatten() for one in gradients], torch.tensor([float(len(x))])])
    dist.all_reduce(flat)
    *sums, count = flat.split([*[one.numel() for one in gradients], 1])
    return [total.view_as(one) / count for total, one in zip(sums, gradients, strict=True)]


PAIRS = {
    "10/few-calls": (one_by_one, two_batches),
    "11/only-rows": (whole_table, only_rows),
    "12/one-f-one-b": (gpipe, one_f_one_b),
    "13/small-step": (replicated_step, sharded_step),
    "14/own-tokens": (all_tokens, own_tokens),
    "16/few-bytes": (four_messages, one_small_message),
    "17/small-files": (saved_by_rank_0, saved_by_all),
    "18/one-step": (whole_share, in_parts),
    "19/save-in-time": (saved_seldom, saved_in_time),
    "20/one-message": (five_messages, one_message),
}
LONG_PAIRS = {"15/across": (over_all_ranks, in_two_levels, 4)}
