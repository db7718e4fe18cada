"""Kernels that run before the torch operators.

kernel     records a call, may refuse it or have it checked, and calls the operator
lazy_bits  tensors with a lazy negation or conjugation
repeats    fast path for calls that a training loop repeats in each step
"""
