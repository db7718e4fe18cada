"""The stretches of a training step.

stretches   input, forward, backward, optimizer
buckets     which gradients a bucket of DDP holds, and which call synchronises it
comm_hooks  users' comm hooks of DDP, seen bucket by bucket
"""
