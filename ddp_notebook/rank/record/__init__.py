"""What a rank does, as rows for the notebook.

feature         what the recording adds to a rank
rank_recording  what a rank records, put together
event_buffer    what the threads that train leave behind: references and times
flusher         the recorder's thread: empties the event buffer
batches         what the event buffer holds, made into rows
text_numbers    texts of a recording, sent once each
previews        small copies of tensors
value_sampling  which steps of a fast training have theirs taken
training/       the stretches of a training step: input, forward, backward, optimizer
metrics         `log`, and variables that are watched
resources       memory and load
gpu_times       when work on a GPU began and ended
baseline_run    a cell on one rank alone, to compare with
"""
