"""Catalogue of error messages of torch, each with a cause in the terms of the user and a fix.

known_error      one message: its text, the facts that it needs, cause and fix
raised           facts about an error: its text, the function that raised it, and the local variables on the way
catalogue        the feature of a rank: all entries by area, and the search for the entry of an error
parameter_names  parameters, modules and groups as text
c10d             collectives, messages, groups and stores
c10d_groups      creation of groups, meshes and stores
ddp              DistributedDataParallel
fsdp             fully_shard
dtensor          DTensor and tensor parallel
pipelining       pipelines
checkpoints      torch.distributed.checkpoint and torch.load
rpc              RPC
data_loading     DataLoader and its samplers
nccl             NCCL, which needs GPUs
"""
