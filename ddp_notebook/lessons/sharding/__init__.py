"""Tensors in pieces.

placement_picture  picture of the parts that each rank holds
product            A @ B in pieces: guess, multiply, combine
mesh_training      a training run on a mesh: guess, run, communication along rows and columns
ranks              the code of these two on each rank
"""
