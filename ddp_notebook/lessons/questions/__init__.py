"""Exercises with a checked answer.

questions        what was asked, and whether an answer is right
judging          how answers are judged
answers          what notebooks 04 to 07 ask
answers_training what notebooks 08 and 09 ask
answers_calls    what notebooks 10 and 11 ask
answers_pipelines what notebook 12 asks
answers_memory   what notebook 13 asks
answers_sharding what notebooks 14 and 15 ask
answers_practice what notebooks 16 to 18 ask
answers_faults   what notebook 19 asks
"""
