"""Point to point.

point_to_point    a scene played on the ranks: who waits for whom, races, deadlocks
message_scenes    the scenes: what each shows, and its code
transfer_picture  a cell's sends and receives, drawn as they were recorded
"""
