"""Agents of torchrun's that a notebook starts; what it sees of their ranks is in `torchrun/`.

keeper  the process between the kernel and the agents, which ends them and all below them
agent   torchrun itself, with the script under `ddp_notebook.attach`
"""
