"""Cells in the background: the prompt is back at once, and their output goes on under them.

feature  declares `%ddp_jobs`, `%ddp_wait` and `%ddp_cancel`
job      one of them: a future of its result, and the line that says how it is
jobs     those of a session: started, listed, waited for, cancelled
"""
