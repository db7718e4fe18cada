"""DDP from the inside.

inside      a training step on the running ranks, in stages or at speed
ranks       what each rank does for it
times       when each rank did what
pictures    numbers before and after, buckets, times
sliders     its options as sliders
"""
