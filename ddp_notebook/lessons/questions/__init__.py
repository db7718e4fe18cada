"""Exercises with a checked answer.

questions  checks an answer and explains the verdict
judging    rules for the verdict
answers    the questions of the notebooks
"""
