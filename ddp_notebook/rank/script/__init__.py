"""A rank that torchrun has started, which a notebook may look at: see `ddp_notebook.attach`.

output           pipes of its own for what it writes, if a notebook has started it
program          the script or module, run as Python itself would run it
attach_socket    lets one notebook in at a time, which may come and go
script_observer  what is seen of the script: operations, training, where it is; told to the notebook that is there
free_waits       ends the operation that a script waits in, by cutting its connections
"""
