"""Whether ranks hold the same.

agreement      the ranks' answers about their variables, side by side: `%ddp_check`
differences    entries that are not the same on all ranks, and by how much
disagreements  what is wrong although each rank is content
sentences      what agrees and what was not compared, in words
"""
