"""A cell that runs twice from the same state, for `%%ddp_twice`.

feature      handlers of a rank
observation  checksums of batches, gradients and parameters in both runs
reads        variables that a cell reads
"""
