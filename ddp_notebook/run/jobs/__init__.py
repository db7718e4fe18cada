"""Cells in the background: the prompt returns immediately, and their output appears below their cell.

feature  declares `%ddp_jobs`, `%ddp_wait` and `%ddp_cancel`
job      one job: a future of its result, with a status line
jobs     all jobs of a session: starts, lists, waits, cancels
"""
