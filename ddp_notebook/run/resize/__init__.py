"""More or fewer ranks in a running session.

feature     declares `%ddp_resize`
resizing    what is in the way, which ranks stay, and what new ranks get
"""
