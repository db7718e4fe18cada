"""Exercises with a checked answer.

questions  checks an answer and explains the verdict
judging    rules for the verdict
catalogue  the questions of all lessons, from the modules `lesson_NN`: one for each lesson, with its questions
"""
