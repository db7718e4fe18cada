"""Findings: silent mistakes in the training steps of a cell. Ranks send facts (`rank/findings`).

feature       declaration
cell_findings the part of a session: lines under a cell, and findings for the report
first_bucket  the first recorded gradients that were not finite
decide        derives findings from the facts of all ranks
compare       findings that hold only for several ranks together
sentences     the sentence of each finding
silenced      names of findings that the code of a cell silences
"""
