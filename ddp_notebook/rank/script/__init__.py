"""Rank of a torchrun job that a notebook can observe, see `ddp_notebook.attach`.

output           separate output pipes, if a notebook has started the job
program          runs the script or module like Python
attach_socket    accepts one notebook at a time
script_observer  observes operations and training, and reports them to the attached notebook
breakpoints      the error of `breakpoint()` in a script without a terminal
free_waits       aborts the operation that a script waits in
"""
