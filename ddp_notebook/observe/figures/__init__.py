"""Pictures of a recording.

figures     the pictures that `Recording.plot_...` return
palette     colours with a fixed meaning
drawing     how pictures look: axes, labels
bars        steps and buckets
curves      metrics and bandwidth
"""
