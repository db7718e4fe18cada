"""Tensors in pieces.

placement_picture  the picture of who holds what
product            A @ B in pieces: guessed, multiplied, put together
mesh_training      a training on a mesh: guessed, run, who talks to whom
ranks              what each rank does for these two
"""
