"""torchrun agents started by a notebook. `torchrun/` has the view of their ranks.

parent         the process between the kernel and the agents, which ends them and their descendants
rendezvous     the store of the agents' rendezvous
elastic_agent  torchrun itself, which runs the script under `ddp_notebook.attach`
log_folder     the folder for the output of the job's ranks
"""
