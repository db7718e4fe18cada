"""The stretches of a training step.

spans             forward, backward, optimizer
loaders           waits for batches and for the start and end of workers; settings of loaders
optimizers        those in their steps, and their names
pipeline_stages   what the stages of a pipeline do with each microbatch
blocks            code that the user has named
gradients         the gradients of one parameter, as computed and averaged
buckets           which gradients a bucket of DDP holds, and which call synchronises it
repeated_buckets  buckets that took the short way through the kernel, as rows
comm_hooks        users' comm hooks of DDP, seen bucket by bucket
model_names       names of models and optimizers
wrapping          what is wrapped around functions of torch
"""
