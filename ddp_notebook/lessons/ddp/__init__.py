"""DDP from the inside.

inside          a model in DDP on the running ranks: stages, runs at full speed, comparisons
inside_options  options of the model and its training
stages          a training step in five stages
driver          runs the cells that control the model on the ranks
ranks           the code on each rank
times           divides the steps of each rank into pieces of time
stage_pictures  pictures of the numbers before and after a stage
runs            some steps with the same options, at full speed
run_pictures    pictures of the buckets, and a timeline of a step
sliders         the options as sliders
"""
