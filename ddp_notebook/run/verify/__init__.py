"""Comparison of a training step with one process: `%ddp_verify`.

feature       declares `%ddp_verify`
verification  result of a comparison, and its text
verifying     sends the step to the ranks
causes        derives findings from the facts of the ranks
gradients     norms and ratios of gradients, from their inner products
last_step     finds the step in the text of a cell
accumulation  finds out if the step divides its loss by the number of micro-steps
"""
