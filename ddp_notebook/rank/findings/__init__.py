"""Facts about the training steps of a cell, from which the notebook derives findings (`run/findings`).

feature      the feature of a rank
steps        what each optimizer step used: gradients, averaging, models
held         parameters of an optimizer, and the models that contain them
gradients    checks of gradients that read few elements
batches      checksums of the inputs of models
operations   asynchronous operations without a wait
passes       passes of data loaders over their data
"""
