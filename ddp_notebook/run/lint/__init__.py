"""Collectives that cannot work, found in a cell before it is sent.

warnings     compares the collectives that the ranks would reach
statements   a cell as one rank reads it, statement by statement
callees      what a function does when a rank calls it
expressions  their values on one rank
branches     what is known of a rank so far, and both branches of a test
values       plain values, and those that are not known
groups       the collectives of torch, and the groups that they wait in
"""
