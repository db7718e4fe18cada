"""Change of the number of ranks in a running session.

feature     declares `%ddp_resize`
resizing    checks for blockers, selects the ranks that stay, copies variables to new ranks
"""
