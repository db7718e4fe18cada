"""What the notebook knows of its ranks: what they have recorded, and what follows from it.

intake      from the wire into the recording, in a thread of its own
recording   what the user asks (`session.recording`)
store       the tables behind it: takes in batches of all ranks
ring        rows with a growing index, bounded
texts       texts by number
clock       offsets between the ranks' clocks and the notebook's
collectives calls as a sequence
frames      tables for pandas
files       recordings in files
views       the plain data that questions are answered with
matching    the same collective on all its ranks
waits       who waited for whom in a collective, and who is slow
steps       what the time of a training step went into
cycles      where steps begin and end
bandwidth   bytes per second by operation and size
report      a training cell in words, and what to try
alone       what one rank reached by itself
advice      its verdict and what to try
units       numbers with their units
figures     the same as pictures
trace       the same for Perfetto
"""
