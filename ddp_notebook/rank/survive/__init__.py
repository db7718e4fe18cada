"""A loop of training steps that goes on when a rank dies (`ddp_notebook.survive`).

feature       what it adds to a rank
survival      what a rank does when others are gone: waits, is formed anew, goes back to the step that all redo
loop          the steps as the user sees them
tracked       what a step changes: kept before each step, put back, and sent
step_batches  the batch of each step, also when the step is done again
checkpoint    all of it in a folder, and from there
ring          what ranks send each other for that, on connections that nobody else sees
"""
