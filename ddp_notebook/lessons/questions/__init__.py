"""Exercises with a checked answer.

questions  what was asked, and whether an answer is right
judging    how answers are judged
answers    what the notebooks ask
"""
