"""What a rank holds of models that are spread over ranks.

parts       which part of which tensor it has
memory      the memory that parameters, gradients, optimizer state, activations and the rest take
mistakes    wrong uses of sharding that nothing else complains about
equations   meshes and placements that do not fit, with their numbers
"""
