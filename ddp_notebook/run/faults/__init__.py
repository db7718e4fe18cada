"""Fault injection on ranks.

feature  declares `%ddp_fault`, and makes ranks fail
"""
