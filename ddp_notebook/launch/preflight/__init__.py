"""Hosts side by side before a group forms: what they are like, and whether they reach each other.

check    `%ddp_start --check`: starts no rank
fit      before every group of several hosts: what would keep it from forming
query    what hosts are asked, all at once
pairs    which hosts try to connect, and where
compare  what is not the same everywhere, and what to do about it
table    how it is shown
"""
