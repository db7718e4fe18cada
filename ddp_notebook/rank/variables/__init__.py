"""A rank's variables.

values      as bytes, to the notebook and back
between     tasks between two steps of a running cell
summary     in a few bytes each, to be compared between ranks
comparison  what of them is compared: `model.fc.weight`, `loader.batch_size`
copying     for a rank that was replaced
samplers    samplers of data go over as many ranks as there are now
handover    from a rank to others, by a broadcast
"""
