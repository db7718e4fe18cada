"""A training cell in figures and words.

report     what its steps took, why, and what to try
advice     the verdict in one sentence
bubbles    how much of a pipeline is empty, and what makes it less
cores      ranks that are ready to run and have no core; ranks that share a core
loading    what loaders are set to, and what makes them faster
outside    time that belongs to no step: evaluation, checkpoints, before and after
memory     page faults: what steps take from the system anew
network    what machines waited for that no rank was late for
remote     who serves remote calls, who waits for them, where they queue
bandwidth  bytes per second by operation and size
"""
