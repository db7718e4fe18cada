"""What a site, or a user, has written down for all starts: `~/.config/ddp_notebook.toml`.

file     where it is, what may stand in it, and what is said of a line that is wrong
names    what its names of hosts and its arguments for Slurm make of what was asked for
"""
