"""Stop a cell before an optimizer step that would use NaN or infinite gradients: `%ddp_nan --catch`.

catcher          the checks of one cell, and the error that stops it on all ranks
checked_calls    the gradients of each average: checked before it, and marked so that all ranks see the result
last_forward     inputs and random state of the last forward of each model
replay           repeats that forward and its backward on this rank alone, and restores everything
origin           the module, or other place, that made the first bad value
"""
