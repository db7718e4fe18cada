"""Ratios measured side by side in one run, and the results that are kept: `python -m tests.benchmarks --write`."""
