"""Faults that the user injects on ranks.

feature  declares `%ddp_fault`
faults   makes ranks fail, to see what follows
"""
