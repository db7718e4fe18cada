"""Agents of torchrun's that a notebook starts, or a shell ends; what is seen of their ranks is in `torchrun/`.

parent      the process between the kernel and the agents, which ends them and all below them
rendezvous  the store at which agents meet
agent       torchrun itself, with the script under `ddp_notebook.attach`
log_folder  the folder for what the ranks of such a job write
"""
