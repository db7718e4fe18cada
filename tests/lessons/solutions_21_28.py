"""Solutions of the puzzles of lessons 21 to 28. The ranks run them, with their own `torch`, `dist` and `rank`."""

# mypy: ignore-errors
from __future__ import annotations


def mean_in_each_step(model, optimizer, loader):
    means = []
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        means.append(mean.item() / world_size)
    return sum(means) / len(means)


def mean_of_the_epoch(model, optimizer, loader):
    total = torch.zeros(1, dtype=torch.float64)
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / len(loader) / world_size


def full_precision(model):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, allreduce_hook)


def half_precision(model):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model.register_comm_hook(None, fp16_compress_hook)


def gathered_objects(fine):
    answers = [None] * world_size
    dist.all_gather_object(answers, fine)
    return [number for number, answer in enumerate(answers) if not answer]


def one_byte_each(fine):
    failed = torch.zeros(world_size, dtype=torch.uint8)
    failed[rank] = not fine
    dist.all_reduce(failed)
    return failed.nonzero().flatten().tolist()


def in_turn(sizes, readers):
    return [list(range(reader, len(sizes), readers)) for reader in range(readers)]


def largest_first(sizes, readers):
    parts = [[] for _ in range(readers)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        min(parts, key=lambda part: sum(sizes[one] for one in part)).append(number)
    return parts


class Flat:
    def __init__(self, model, link):
        self.parameters, self.link = list(model.parameters()), link

    def finish(self):
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        self.link.all_reduce(flat).wait()
        flat /= world_size
        for p, mean in zip(self.parameters, flat.split([p.numel() for p in self.parameters]), strict=True):
            p.grad.copy_(mean.view_as(p))


class Buckets:
    def __init__(self, model, link):
        self.link, self.missing = link, len(list(model.parameters()))
        self.count, self.bucket, self.under_way = self.missing, [], []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        self.bucket.append(p)
        self.missing -= 1
        if sum(one.grad.nbytes for one in self.bucket) >= 132_096 or self.missing == 0:
            flat = torch.cat([one.grad.flatten() for one in self.bucket])
            self.under_way.append((self.bucket, flat, self.link.all_reduce(flat)))
            self.bucket = []

    def finish(self):
        for parameters, flat, transfer in self.under_way:
            transfer.wait()
            flat /= world_size
            for p, mean in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                p.grad.copy_(mean.view_as(p))
        self.under_way.clear()
        self.missing = self.count


class Gathered:
    def __init__(self, weights):
        self.shards = [one.flatten().chunk(world_size)[rank].clone().requires_grad_() for one in weights]

    def loss(self, x, y):
        for shard in self.shards:
            whole = torch.empty(120 * 120)
            dist.all_gather_into_tensor(whole, shard.detach())
            weight = whole.view(120, 120).requires_grad_()
            weight.register_post_accumulate_grad_hook(lambda weight, shard=shard: self.ready(weight, shard))
            x = (x @ weight.t()).relu()
        return (x - y).square().mean()

    def ready(self, weight, shard):
        dist.all_reduce(weight.grad)
        shard.grad = weight.grad.flatten().chunk(world_size)[rank] / world_size
        weight.grad = None


class GatheredAgain:
    def __init__(self, weights):
        self.shards = [one.flatten().chunk(world_size)[rank].clone().requires_grad_() for one in weights]

    def loss(self, x, y):
        def gather(shard):
            whole = torch.empty(120 * 120)
            dist.all_gather_into_tensor(whole, shard.detach())
            return whole.view(120, 120)

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, shard):
                ctx.save_for_backward(x, shard)
                return x @ gather(shard).t()

            @staticmethod
            def backward(ctx, gradient):
                x, shard = ctx.saved_tensors
                of_x = gradient @ gather(shard) if ctx.needs_input_grad[0] else None
                part = torch.empty_like(shard)
                dist.reduce_scatter_tensor(part, (gradient.t() @ x).flatten())
                return of_x, part / world_size

        for shard in self.shards:
            x = Linear.apply(x, shard).relu()
        return (x - y).square().mean()


def ask_in_each_step(model, optimizer, batches):
    taken = 0
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        fine = loss.detach().isfinite().float()
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        optimizer.zero_grad()
        loss.backward()
        if fine:
            optimizer.step()
            taken += 1
    return taken


def look_at_the_mean(model, optimizer, batches):
    taken = 0
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
            taken += 1
    return taken


def one_group():
    return {"tensor": 16, "recompute": True}


def two_dimensions():
    return {"shard": 2, "tensor": 8, "recompute": True}


PAIRS = {
    "21/log": (mean_in_each_step, mean_of_the_epoch),
    "22/lighter": (full_precision, half_precision),
    "23/agree": (gathered_objects, one_byte_each),
    "24/assign": (in_turn, largest_first),
    "25/overlap": (Flat, Buckets),
    "26/sharded": (Gathered, GatheredAgain),
    "27/skip": (ask_in_each_step, look_at_the_mean),
    "28/plan": (one_group, two_dimensions),
}
