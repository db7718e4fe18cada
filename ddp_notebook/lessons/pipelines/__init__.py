"""Pipelines: one model divided over the ranks, and the order of their computations.

pipeline          a model in stages on the running ranks: runs with any schedule, guesses, comparisons
pipeline_sliders  controls of the lesson
schedules         the schedules, and the stages of each rank
by_hand           a pipeline of sends and receives, in any order of actions
ranks             the code on each rank
"""
