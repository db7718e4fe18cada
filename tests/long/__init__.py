"""Tests with many repetitions: `make test-long`."""
