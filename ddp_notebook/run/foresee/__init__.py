"""Collectives that cannot work, found in a cell before it is sent.

warnings    compares what the ranks would do
reading     a cell as one rank reads it: which collectives it passes
"""
