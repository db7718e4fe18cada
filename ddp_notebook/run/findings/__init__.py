"""Findings: silent mistakes in the training steps of a cell. Ranks send facts (`rank/findings`).

feature          declaration
cell_findings    derives findings from the facts of all ranks; lines under a cell, findings for the report
rank_comparison  findings that hold only for several ranks together
random_numbers   comparison of the random numbers of ranks
sentences        the sentence of each finding
"""
