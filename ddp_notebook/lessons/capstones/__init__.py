"""Capstones: larger tasks that use several lessons.

bug       one broken program of the course: shows it, runs it, judges a repair
programs  the broken programs, with their repairs
measures  measures for the puzzles of the capstones
overlap   picture of a step of the reader's DDP: backward, hidden and exposed transfers
plan      memory and time of a training step of a large model, by formulas
ranks     code on the ranks for the capstones that build DDP and FSDP
"""
