"""What ranks record, as the session asks for it and brings it in.

feature             declares `%ddp_record`, `%ddp_report` and `%ddp_trace`
recordings          how much cells record, and the recording up to now
baseline            the last training on rank 0 alone, to compare with
notebook_recording  a recording, and `load`, with a line about an interrupt
chrome_trace        the recording as a file for Perfetto, with what torch's profiler has left
"""
