"""Inputs that a backend accepts and computes wrongly: every operation of `torch.distributed` with every kind of tensor.

cases    the operations, the kinds, and one attempt of a pair on one rank
matrix   every pair with torch alone, in two processes that may die
on_ranks every pair on the ranks of a session
"""
