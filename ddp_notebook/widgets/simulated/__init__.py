"""Ranks that do not exist.

simulation   `simulate`: a recording of them, for documentation, talks and tests
training     what they would have sent
shape        what is simulated: the model, and what happens in which step
schedule     when everything happens
rows         rows of all ranks at once
collectives  their collectives and messages
values       what would have been in the tensors
"""
