"""Training loop that continues after the death of a rank (`ddp_notebook.survive`).

feature       hooks of the survive feature
survival      recovery of a rank: waits, joins the new group and returns to the step to repeat
loop          iteration over the steps, for the user
tracked       objects that a step changes: saved before each step, restored, and sent
step_batches  batch of each step, also for a repeated step
checkpoint    saves and loads the state of a loop
ring          private connections between ranks for these transfers
"""
