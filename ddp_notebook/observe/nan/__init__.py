"""The first NaN or infinite value of a training run: `%ddp_nan`.

first_nan        the answer: the first step, ranks and gradients, in one sentence with details
gradient_inputs  the recorded gradients of one cell before they were averaged
metric_values    logged numbers that were NaN or infinite until the end of the cell
"""
