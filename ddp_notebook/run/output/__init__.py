"""Output and displays of a cell's ranks, on their way to the front end.

screen          output in the notebook ──► fold (merges equal lines of several ranks)
"""
