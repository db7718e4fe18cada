"""Comparison of two training runs, for `%ddp_diff`: changes of times, collectives, memory and numbers.

comparison  `compare`, and the result in sentences, numbers and JSON
sides       the two training runs, and how much a quantity varies within a run
times       parts of a step by rank, changes beyond noise, and the cause
calls       collectives by the line that calls them
settings    ranks, batch, gradients, data loading, memory
numbers     the first metric, tensor or gradient that differs
samples     samples that DataLoaders gave, by their indices
names       names that are equal in both runs
page        the result as an HTML page
named       runs by number of a cell, file or folder
command     `python -m ddp_notebook diff A B`
"""
