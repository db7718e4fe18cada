"""Errors of DataLoader and its samplers."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed import get_world_size, is_initialized

from ddp_notebook.rank.torch_errors.known_error import KnownError, Values
from ddp_notebook.rank.torch_errors.raised import Raised

_DATA = r"^torch\.utils\.data\."
_LOADER = _DATA + "dataloader:"
_COLLATE = _DATA + r"_utils\.collate:"
_DEAD = {
    "Killed": "SIGKILL, which the kernel sends if memory runs out",
    "Bus error": "SIGBUS, which comes if /dev/shm is full",
    "Segmentation fault": "a segmentation fault in C code",
    "Aborted": "an abort in C code",
}


def _signal(_: Raised, found: Mapping[str, str]) -> Values:
    name = found["signal"].rstrip(". ")
    return {"signal": next((text for start, text in _DEAD.items() if name.startswith(start)), f"the signal {name}")}


def _type(_: Raised, found: Mapping[str, str]) -> Values:
    return {"type": found["type"].rpartition(".")[2]}


def _distributed(raised: Raised, _: Mapping[str, str]) -> Values | None:
    sampler = raised.local(_LOADER + r"DataLoader\.__init__$", "sampler")
    return {} if type(sampler).__name__ == "DistributedSampler" else None


def _ranks(raised: Raised, found: Mapping[str, str]) -> Values | None:
    if not raised.has(_DATA + "distributed:"):
        return None
    size = get_world_size() if is_initialized() else 0
    return {"replicas": int(found["last"]) + 1, "session": f"; the session has {size} ranks" if size else ""}


def _empty(raised: Raised, _: Mapping[str, str]) -> Values | None:
    source = raised.local(_DATA + r"sampler:RandomSampler\.__init__$", "data_source")
    return None if source is None or len(source) else {"type": type(source).__name__}


def _lengths(raised: Raised, _: Mapping[str, str]) -> Values | None:
    place = _DATA + "dataset:random_split$"
    lengths, dataset = raised.local(place, "lengths"), raised.local(place, "dataset")
    if lengths is None or dataset is None:
        return None
    return {"lengths": list(lengths), "sum": sum(lengths), "count": len(dataset)}


ENTRIES = (
    KnownError(
        name="worker that has exited",
        text="DataLoader worker (pid(s) {pids}) exited unexpectedly",
        kind="RuntimeError",
        where=_LOADER,
        cause="a worker process of this DataLoader has ended, often because of missing memory or an error at its start",
        fix="use fewer workers, or num_workers=0 to see the error",
    ),
    KnownError(
        name="worker killed by a signal",
        text="DataLoader worker (pid {pid:d}) is killed by signal: {signal}",
        kind="RuntimeError",
        where="",
        facts=_signal,
        cause="a worker process of this DataLoader ended by {signal}",
        fix="use fewer workers or smaller batches if memory is short, or num_workers=0 to see the line",
    ),
    KnownError(
        name="timeout of a loader",
        text="DataLoader timed out after {seconds:d} seconds",
        kind="RuntimeError",
        where=_LOADER,
        cause="no worker of this DataLoader finished a batch within {seconds} s",
        fix="pass a longer timeout, or more workers; timeout=0 waits without a limit",
    ),
    KnownError(
        name="samples of different shapes",
        text="stack expects each tensor to be equal size, but got [{one}] at entry 0 and [{two}] at entry {index:d}",
        kind="RuntimeError",
        where=_COLLATE,
        cause="samples 0 and {index} of a batch have tensors of the shapes [{one}] and [{two}], and default_collate "
        "stacks them",
        fix="pad them in the dataset, or in collate_fn with torch.nn.utils.rnn.pad_sequence",
    ),
    KnownError(
        name="lists of different lengths",
        text="each element in list of batch should be of equal size",
        kind="RuntimeError",
        where=_COLLATE,
        cause="the samples of a batch are lists of different lengths, and default_collate needs equal ones",
        fix="pad them in the dataset, or pass collate_fn=list to keep them as they are",
    ),
    KnownError(
        name="samples that are nothing",
        text="default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class "
        "'NoneType'>",
        kind="TypeError",
        where=_COLLATE,
        cause="a sample of this batch is None or contains None",
        fix="return a value in each branch of __getitem__, or pass a collate_fn that skips None",
    ),
    KnownError(
        name="samples that cannot be stacked",
        text="default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class "
        "'{type}'>",
        kind="TypeError",
        where=_COLLATE,
        facts=_type,
        cause="the samples are or contain objects of the class {type}, which default_collate cannot stack",
        fix="convert them to tensors in __getitem__, or pass collate_fn=list",
    ),
    KnownError(
        name="shuffle with a DistributedSampler",
        text="sampler option is mutually exclusive with shuffle",
        kind="ValueError",
        where=_LOADER,
        facts=_distributed,
        cause="a DistributedSampler decides the order of the samples",
        fix="leave shuffle out here, pass shuffle=True to DistributedSampler, and call set_epoch(epoch) in each epoch",
    ),
    KnownError(
        name="shuffle with a sampler",
        text="sampler option is mutually exclusive with shuffle",
        kind="ValueError",
        where=_LOADER,
        cause="a sampler already decides the order of the samples",
        fix="leave shuffle out, and shuffle in the sampler",
    ),
    KnownError(
        name="batch_sampler with other options",
        text="batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last",
        kind="ValueError",
        where=_LOADER,
        cause="a batch_sampler already decides which samples are in which batch",
        fix="leave batch_size, shuffle, sampler and drop_last out, and pass them to the batch sampler",
    ),
    KnownError(
        name="shuffle of an IterableDataset",
        text="DataLoader with IterableDataset: expected unspecified shuffle option, but got shuffle=True",
        kind="ValueError",
        where=_LOADER,
        cause="an IterableDataset decides the order of its samples itself",
        fix="leave shuffle out, and shuffle in __iter__",
    ),
    KnownError(
        name="sampler of an IterableDataset",
        text="DataLoader with IterableDataset: expected unspecified sampler option, but got sampler=",
        kind="ValueError",
        where=_LOADER,
        cause="an IterableDataset has no index, so a sampler cannot choose its samples",
        fix="leave sampler out, and give each rank its part in __iter__, such as islice(samples, rank, None, "
        "world_size)",
    ),
    KnownError(
        name="rank of a sampler",
        text="Invalid rank {rank:d}, rank should be in the interval [0, {last:d}]",
        kind="ValueError",
        where=_DATA,
        facts=_ranks,
        cause="rank={rank} does not exist among num_replicas={replicas}{session}",
        fix="leave num_replicas and rank out: DistributedSampler takes them from the default group",
    ),
    KnownError(
        name="empty dataset",
        text="num_samples should be a positive integer value, but got num_samples=0",
        kind="ValueError",
        where=_DATA + "sampler:",
        facts=_empty,
        cause="the dataset, a {type}, has no samples on this rank",
        fix="check the path or the filter of the data on this rank; without shuffle an empty dataset gives no batch",
    ),
    KnownError(
        name="length of an IterableDataset",
        text="object of type '{type}' has no len()",
        kind="TypeError",
        where=_DATA + r"distributed:DistributedSampler\.__init__$",
        cause="DistributedSampler needs the number of samples, and {type} has no len()",
        fix="define __len__, or for an IterableDataset leave the sampler out and give each rank its part in __iter__",
    ),
    KnownError(
        name="iterator as a dataset",
        text="object of type '{type}' has no len()",
        kind="TypeError",
        where=_DATA + "(sampler|dataloader):",
        cause="DataLoader needs the number of samples here, and {type} has no len()",
        fix="pass a list or a Dataset with __len__ and __getitem__, or wrap a stream in an IterableDataset",
    ),
    KnownError(
        name="lengths of a split",
        text="Sum of input lengths does not equal the length of the input dataset!",
        kind="ValueError",
        where=_DATA + "dataset:random_split$",
        facts=_lengths,
        cause="{lengths} adds up to {sum}, and the dataset has {count} samples",
        fix="pass numbers that add up to {count}, or fractions that add up to 1, such as [0.8, 0.2]",
    ),
    KnownError(
        name="prefetch without workers",
        text="prefetch_factor option could only be specified in multiprocessing.",
        kind="ValueError",
        where=_LOADER,
        cause="only worker processes load batches ahead, and num_workers is 0",
        fix="pass num_workers=1 or more, or leave prefetch_factor out",
    ),
)
