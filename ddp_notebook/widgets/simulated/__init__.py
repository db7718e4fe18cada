"""Ranks that are not there.

simulation  a recording of them, for documentation, talks and tests
batches     what they would have sent
"""
