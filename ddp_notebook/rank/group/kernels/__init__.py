"""What runs before torch's own operators.

kernel   notes a call, may refuse it or have it checked, and goes on
repeats  the short way of calls that a training loop makes again in each step
"""
