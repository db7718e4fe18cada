"""Divergence of ranks: one sentence about the line where their paths through a cell diverged.

It is shown on the hang card and in the error of a mismatch.

feature          declaration
diverged_cells   the feature in a session
paths            collectives of each rank with their lines, from the recording
control_flow     graph of the branches and calls of the code
diverging_paths  the control flow between the last common collective and the next one of each rank
branches         the branch, caught exception or conditions that separate ranks
loops            the loop that some ranks have left
sentences        the sentence about the decision that separates ranks
"""
