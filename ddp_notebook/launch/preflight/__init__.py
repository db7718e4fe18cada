"""Preflight check of hosts before a group forms: compare them, and test their connections.

check    `%ddp_start --check`: starts no rank
fit      finds problems before each group of several hosts forms
query    sends requests to all hosts in parallel
pairs    tests connections between hosts
compare  finds differences between hosts, with fixes
table    formats the result
"""
