"""The notebook's part of running cells: send them, wait, show output, and recover from failures.

cells/            cells: sent, waited for and ended, one at a time

session_parts     creates and connects the parts of a session
"""
