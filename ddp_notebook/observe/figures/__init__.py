"""Pictures of a recording.

figures          the pictures that `Recording.plot_...` return
palette          colours with a fixed meaning
drawing          how pictures look: axes, labels
bars             steps and buckets
pipeline_figure  the actions of a pipeline's stages
curves           metrics and bandwidth
sequence         calls between ranks, and references
moments          the same as plain data, for the browser
"""
