"""What the ranks have recorded, and what follows from it: `session.recording`.

observer   a session's recording as it grows
intake     decodes batches from the wire and feeds them, in a thread of its own
recording  `Recording`: the questions, figures and files that users ask for; above all else here
files      `load`: a recording from files
views      the plain data that questions are answered with
remote     the same of calls to other ranks
clock      offsets between the ranks' clocks and the notebook's
writing    a file written whole or not at all

tables/    the rows themselves, in bounded memory; how they are saved
steps/     what the time of training steps went into, and who waited
report/    a training cell in figures and words, and what to try
figures/   the same as pictures
trace/     the same for Perfetto
"""
