"""Completion and help in cells of ranks, from the variables of the rank, in a separate thread.

feature        handles the messages, and has the thread
names          names at the cursor, each with its type
description    help text of a value
"""
