"""Files sent between the notebook and its ranks.

feature   declares `%ddp_sync` and `%ddp_fetch`
files     methods of `session.files`: send and fetch files
fetching  finds files of ranks, and transfers them in pieces
landing   writes fetched files completely or not at all

`launch.sync` sends the notebook's folder to hosts before they have ranks.
"""
