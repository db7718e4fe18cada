"""The recording of the ranks, and its analysis: `session.recording`.

observer   a session's recording while it grows
intake     decodes batches from the wire and feeds them, in its own thread
recording  `Recording`: queries, figures and files for users; uses all other modules of this package
files      `load`: a recording from files
views      plain data that queries return
remote     the same for RPC calls
clock      offsets between the ranks' clocks and the notebook's clock
writing    writes a file completely or not at all

tables/    rows in bounded memory, and how they are saved
steps/     breakdown of training step times, and waits between ranks
report/    a training cell in numbers and sentences, with advice
forecast/  predicted step times on other numbers of ranks
compare/   two training runs: changes of times and numbers
nan/       where the values of a training run stopped being finite
figures/   the recording as figures
trace/     the recording as a trace for Perfetto
"""
