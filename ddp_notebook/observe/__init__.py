"""What the notebook knows of its ranks: what they have recorded, and what follows from it.

ring        rows with a growing index, bounded
recording   takes in batches of all ranks; what the user asks (`session.recording`)
clock       offsets between the ranks' clocks and the notebook's
views       the plain data that questions are answered with
waits       who waited for whom in a collective, and who is slow
steps       what the time of a training step went into
bandwidth   bytes per second by operation and size
report      a training cell in words, and what to try
figures     the same as pictures
trace       the same for Perfetto
"""
