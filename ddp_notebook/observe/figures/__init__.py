"""Pictures of a recording.

figures     the pictures that `Recording.plot_...` return
drawing     how pictures look: colours with a fixed meaning, axes
bars        steps and buckets
curves      metrics and bandwidth
"""
