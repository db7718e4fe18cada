"""One training step of all ranks, compared with the same step on one process.

feature      restores everything after a comparison, also after an interrupt
comparison   runs the step in several forms, and returns facts
model_state  saves and restores models, random states and variables
memory       estimates the memory of a comparison
step         evaluates the loss and its gradients
local_model  models without communication, for a step on one process
fsdp1        complete parameters and gradients of FullyShardedDataParallel
coverage     parameters by name, and the wrappers that average their gradients
reads        names that a step reads before it assigns them
batches      joins and compares the batches of the ranks
factors      evaluates the factors of a loss
products     inner products of gradients of all ranks
"""
