"""What the ranks have recorded, and what follows from it: `session.recording`.

observer    a session's recording as it grows
intake      from the wire into the recording, in a thread of its own
recording   what the user asks of one
views       the plain data that questions are answered with
clock       offsets between the ranks' clocks and the notebook's
files       recordings in files

tables/     the rows themselves, in bounded memory
steps/      what the time of training steps went into, and who waited
report/     a training cell in figures and words, and what to try
figures/    the same as pictures
trace/      the same for Perfetto
"""
