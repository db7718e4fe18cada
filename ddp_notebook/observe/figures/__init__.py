"""Figures of a recording.

figures          the figures that `Recording.plot` returns
palette          colours with a fixed meaning
drawing          style of figures: axes, labels
bars             steps and buckets
pipeline_figure  actions of pipeline stages
curves           metrics and bandwidth
scaling          a forecast
sequence         calls between ranks, and remote references
moments          the same calls as plain data, for the browser
"""
