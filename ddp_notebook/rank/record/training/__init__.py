"""Spans of a training step.

spans             forward, backward, optimizer
loaders           waits for batches, start and end of workers, settings of loaders, and counts of the training loop
optimizers        steps of optimizers, and their names
pipeline_stages   actions of pipeline stages on each microbatch
blocks            code blocks that the user has named, and saved checkpoints
gradients         gradients of one parameter, before and after averaging
buckets           gradients in each DDP bucket, and the calls that synchronize it
repeated_buckets  rows of buckets that used the fast path of the kernel
comm_hooks        DDP comm hooks of users, observed for each bucket
model_names       names of models and optimizers
step_observer     interface for another feature that follows steps
wrapping          wrappers around functions of torch
"""
