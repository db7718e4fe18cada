"""Solutions of the puzzles of lessons 05 to 09. The ranks run them, with their own `torch`, `dist` and `rank`."""

from __future__ import annotations


def to_each(number):
    numbers = torch.zeros(world_size)
    numbers[rank] = number
    sending = [dist.isend(torch.tensor([number]), dst=to, group=post) for to in range(world_size) if to != rank]
    for source in range(world_size):
        if source != rank:
            dist.recv(numbers[source : source + 1], src=source, group=post)
    for one in sending:
        one.wait()
    return numbers.tolist()


def along_a_chain(number):
    numbers = torch.zeros(world_size)
    if rank > 0:
        dist.recv(numbers, src=rank - 1, group=post)
    numbers[rank] = number
    if rank < world_size - 1:
        dist.send(numbers, dst=rank + 1, group=post)
        dist.recv(numbers, src=rank + 1, group=post)
    if rank > 0:
        dist.send(numbers, dst=rank - 1, group=post)
    return numbers.tolist()


def one_message_each(numbers):
    count, total, squares = torch.tensor([float(len(numbers))]).double(), numbers.sum(), (numbers**2).sum()
    for one in (count, total, squares):
        dist.all_reduce(one)
    mean = (total / count).item()
    return mean, ((squares / count).item() - mean**2) ** 0.5


def three_sums(numbers):
    sums = torch.stack([torch.ones_like(numbers).sum(), numbers.sum(), (numbers**2).sum()])
    dist.all_reduce(sums)
    count, total, squares = sums.tolist()
    mean = total / count
    return mean, (squares / count - mean**2) ** 0.5


def whole_tensors(x):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    buffer, incoming = x.clone(), torch.empty_like(x)
    for _ in range(world_size - 1):
        sending = dist.isend(buffer, right, group=post)
        dist.recv(incoming, left, group=post)
        sending.wait()
        x += incoming
        buffer, incoming = incoming, buffer


def in_chunks(x):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = list(x.chunk(world_size))
    for step in range(2 * (world_size - 1)):
        is_adding = step < world_size - 1
        send = (rank - step) % world_size if is_adding else (rank + 1 - step + world_size - 1) % world_size
        receive = (send - 1) % world_size
        came = torch.empty_like(chunks[receive])
        sending = dist.isend(chunks[send], right, group=post)
        dist.recv(came, left, group=post)
        sending.wait()
        if is_adding:
            chunks[receive] += came
        else:
            chunks[receive].copy_(came)


def average_each(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def average_flat(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size
    for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def wrap(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def wrap_in_small_buckets(model):
    return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5)


PAIRS = {
    "06/statistics": (one_message_each, three_sums),
    "08/one-call": (average_each, average_flat),
}
LONG_PAIRS = {
    "05/everyone": (to_each, along_a_chain, 4),
    "07/ring": (whole_tensors, in_chunks, 4),
    "09/hide": (wrap, wrap_in_small_buckets, 2),
}
