"""Where the paths of ranks through a cell diverged: one sentence for the hang card and the error of a mismatch.

feature          declaration
diverged_cells   the feature in a session
paths            collectives of each rank with their lines, from the recording
control_flow     graph of the branches and calls of the code
sentences        the decision that separates the ranks, in words
"""
