"""A recording as a Chrome trace, which Perfetto opens.

trace          all of it
tracks         slices, arrows and counters, and their JSON
communication  collectives and messages on them
profiles       what torch.profiler saw, on the same tracks
"""
