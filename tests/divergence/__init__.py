"""Tests of the sentence about where the paths of ranks diverged."""
