"""Recordings of simulated ranks.

simulation        `simulate`: such a recording, for documentation, talks and tests
training          the batches that the ranks would have sent
shape             parameters: the model, and the events of each step
schedule          the times of all events
rows              rows of all ranks at once
simulated_calls   collectives and messages
simulated_values  values of the tensors
"""
