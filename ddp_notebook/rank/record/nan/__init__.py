"""Stop a cell before an optimizer step that would use NaN or infinite gradients: `%ddp_nan --catch`.

catcher          the checks of one cell, and the error that stops it on all ranks
checked_calls    the gradients of each average: checked before it, and marked so that all ranks see the result
gradients        local parts of gradients, and whether they are finite
last_forward     inputs and random state of the last forwards of each model
replay           repeats such a forward and its backward, and restores everything
shared_models    FSDP and tensor parallel, whose ranks repeat a forward together
origin           the module, or other place, that made the first bad value
"""
