"""Models that are sharded over ranks: placement, memory and detection of mistakes on one rank.

feature             hooks of the sharding feature
shards              parts of tensors that this rank holds
memory              memory of parameters, gradients, optimizer state, activations and other data
out_of_memory       facts about the last out-of-memory error
allocator_history   events of the GPU allocator of torch
mistakes            combines the checks for silent mistakes
scaling             gradients clipped while they are scaled, or averaged too late
replicas            tensors that must be equal on all ranks
saves               paths and contents of saved checkpoints
last_steps          cells in which optimizers made steps
observed_functions  calls a function before or after a torch function
equations           errors with numbers for meshes and placements that do not match
"""
