"""DDP from the inside.

inside          a model in DDP on the running ranks: stages, runs at speed, and what they are compared by
options         how the model is wrapped and trained
stages          a training step in five stages
driver          the cells that drive the model on the ranks
ranks           what each rank does
times           when each rank did what
stage_pictures  numbers before and after a stage
runs            some steps with the same options, at speed
run_pictures    the buckets, and a timeline of a step
sliders         its options as sliders
"""
