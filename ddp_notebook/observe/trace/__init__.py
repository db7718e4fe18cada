"""A recording as a Chrome trace, for Perfetto.

trace          the complete trace
tracks         slices, arrows and counters, and their JSON
communication  collectives and messages on the tracks
profiles       profiles of torch.profiler, on the same tracks
"""
