"""What a rank holds of models that are spread over ranks.

feature             what sharding adds to a rank
shards              which part of which tensor it has
memory              the memory that parameters, gradients, optimizer state, activations and the rest take
mistakes            wrong uses that nothing else complains about, put together
scaling             gradients clipped while they are scaled, or averaged too late
replicas            what is said to be the same on all ranks
saves               what was saved, and where
observed_functions  functions of torch that somebody looks at before they run, or when they have returned
equations           meshes and placements that do not fit, with their numbers
"""
