"""Benchmarks that measure ratios within one run, and their stored results: `python -m tests.benchmarks --write`."""
