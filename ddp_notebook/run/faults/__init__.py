"""Fault injection on ranks.

feature  declares `%ddp_fault`
faults   makes ranks fail
"""
