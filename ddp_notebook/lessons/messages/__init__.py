"""Point to point.

messages    scenes: who waits for whom, races, deadlocks
transfers   a cell's sends and receives, drawn as they were recorded
"""
