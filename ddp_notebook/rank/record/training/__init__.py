"""The stretches of a training step.

stretches   input, forward, backward, optimizer
gradients   the gradients of one parameter, as computed and averaged
buckets     which gradients a bucket of DDP holds, and which call synchronises it
comm_hooks  users' comm hooks of DDP, seen bucket by bucket
"""
