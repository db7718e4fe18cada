"""Facts about the training steps of a cell, from which the notebook derives findings (`run/findings`).

feature               the feature of a rank
step_facts            what each optimizer step used: gradients, averaging, models
optimizer_parameters  parameters of an optimizer, and the models that contain them
outside_parameters    parameters that an optimizer trains with those of a DDP model, and that DDP does not average
tensor_checks         checks of gradients and losses that read few elements; checksums of the inputs of models
operations            asynchronous operations without a wait
values                values that collectives of the user get
passes                passes of data loaders over their data
clipping              gradients that are clipped before they exist, or after their step
random_draws          random states of the first step, and the parts that drew from them
resets                optimizers whose gradients are never reset, or never used
reductions            losses and gradients that the user's collectives change
partial_outputs       losses that are computed from a part of a sum
sharded_weights       weights that `fully_shard` splits
loaded_names          state dicts whose names fit no parameter
"""
