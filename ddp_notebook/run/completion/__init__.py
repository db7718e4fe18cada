"""Completion (Tab) and help (Shift-Tab) in cells of ranks.

feature          declaration
rank_code        finds the code of ranks in a cell
cursor           reads the text before the cursor
answers          asks a rank, and makes the kernel's replies
kernel_requests  answers the kernel's requests, also while a cell runs
"""
