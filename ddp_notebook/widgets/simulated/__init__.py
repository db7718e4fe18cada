"""Ranks that do not exist.

simulation  `simulate`: a recording of them, for documentation, talks and tests
batches     what they would have sent
shape       what is simulated: the model, and what happens in which step
times       when everything happens
rows        rows of all ranks at once
calls       their collectives and messages
values      what would have been in the tensors
"""
