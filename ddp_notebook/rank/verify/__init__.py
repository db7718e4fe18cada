"""One training step of all ranks, compared with the same step on one process.

feature      restores everything after a comparison, also after an interrupt
comparison   runs the step in several forms, and returns facts
ranks        exchanges values between the ranks, and raises errors on all of them
runs         computes the step in one of its forms on this rank
step         evaluates the loss and its gradients
whole        computes the gradients of the whole batch on one process
repeats      finds out if a step gives other gradients each time
statements   effects of the user's hooks and of statements after `backward`
facts        facts about the step, its batch and its wrappers
copies       tensors of the models that differ between ranks
noise        silences dropout and batch statistics, and finds other random numbers
model_state  saves and restores models, random states and variables
memory       estimates the memory of a comparison
local_model  models without communication, for a step on one process
fsdp1        complete parameters and gradients of FullyShardedDataParallel
coverage     parameters by name, and the wrappers that average their gradients
reads        names that a step reads before it assigns them
batches      joins and compares the batches of the ranks
factors      evaluates the factors of a loss
products     inner products of gradients of all ranks
"""
