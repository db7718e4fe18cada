"""Point-to-point communication.

point_to_point    a scene played on the ranks: waits, races, deadlocks
message_scenes    the scenes: explanation and code
transfer_picture  sends and receives of a cell, drawn from the recording
"""
