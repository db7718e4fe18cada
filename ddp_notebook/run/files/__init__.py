"""Files between the notebook and its ranks.

feature   declares `%ddp_sync` and `%ddp_fetch`
files     methods of `session.files`: send and fetch files
fetching  files of ranks: found, told apart, and brought here in pieces
landing   how they are written here: whole or not at all

The notebook's folder goes to hosts by `launch.sync`, before they have ranks.
"""
