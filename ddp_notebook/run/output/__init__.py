"""Output and displays of a cell's ranks, on their way to the front end.

screen          output in the notebook ──► fold (merges equal lines of several ranks)
                                   ──► unfinished (lines still being written) ──► rate_limiter
fold            shows lines that several ranks wrote once
numbers         merges lines that differ only in numbers
slots           arranges displays of several ranks in the order of the ranks
labels          labels of lines: the ranks that wrote a line
unfinished      progress bars and other lines that change in place
display_target  destination of output: the main thread's own, or the output of one cell
rate_limiter    batches messages for the front end, within Jupyter's rate limit
card            the hang card: the waiting ranks, their places, and the reason
comms           widgets of ranks
message_rate    the message rate that Jupyter accepts
"""
