"""What a cell's ranks write and display, on its way to the front end.

screen          output in the notebook ──► fold (equal lines of several ranks)
                                   ──► unfinished (lines still being written) ──► rate_limiter
fold            lines that several ranks wrote, shown once
numbers         lines that differ only in numbers, merged into one
slots           displays of several ranks in one place, in the order of the ranks
labels          the label of a line: the ranks that wrote it
unfinished      bars, dots and other lines that change in their place
display_target  where output goes: as the main thread's own, or under one cell
rate_limiter    the way to the front end: batches, and no more than Jupyter takes
card            the hang card: who waits where, and why
comms           widgets of ranks
pump            the thread that handles displays and widget messages
message_rate    the rate of messages that Jupyter accepts
"""
