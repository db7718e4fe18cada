"""Sharded models: the parts of each rank, their memory, and checks of errors."""
