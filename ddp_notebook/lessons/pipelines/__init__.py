"""Pipelines: one model cut over the ranks, and who computes when.

pipeline          a model in stages on the running ranks: runs with any schedule, guesses, what they are compared by
pipeline_sliders  controls of the lesson
schedules         the schedules, and where the stages of a rank lie
ranks             what each rank does
"""
