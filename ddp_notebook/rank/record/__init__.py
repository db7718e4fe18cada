"""Recording: a rank's activity, as rows for the notebook.

feature         adds the recording to a rank
rank_recording  the recording of a rank, assembled
event_buffer    references and times from the training threads
flusher         the recorder's thread, which empties the event buffer
batches         makes rows of the event buffer's records
text_numbers    texts of a recording, each of which is sent once
previews        small copies of tensors
value_sampling  the steps of fast training whose tensor values are recorded
training/       the spans of a training step: input, forward, backward, optimizer
metrics         `log`, and watched variables
resources       memory and load
gpu_times       start and end times of work on a GPU
baseline_run    a cell on one rank without communication, as a baseline
nan/            stops a cell before an optimizer step with NaN
"""
