"""Debugger on a rank: `breakpoint()` in cells, and the frames of a failed cell afterwards.

feature        the feature: replaces the functions that open a debugger, and follows cells
rank_pdb       pdb, whose commands are requests to the notebook
long_timeouts  holds the time limits of operations while a debugger waits
post_mortem    the failure of the last cell
adapter        debugpy, for the debugger of the front end
"""
