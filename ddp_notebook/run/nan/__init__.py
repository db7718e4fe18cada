"""The first NaN of a run: `%ddp_nan`, and cells that stop at the first step with it.

feature          declaration
caught_nan       the sentence under a cell that was stopped, from the facts of all ranks
"""
