"""Recording of the ranks, as a session controls and collects it.

feature             declares `%ddp_record`, `%ddp_report`, `%ddp_diff` and `%ddp_trace`
recordings          recording level of cells, and the recording up to now
baseline            the last training cell on rank 0 alone, for comparison
notebook_recording  `Recording` and `load` with a message after an interrupt
chrome_trace        the recording as a file for Perfetto, including torch profiles
"""
