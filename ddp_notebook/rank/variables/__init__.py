"""A rank's variables.

values      as bytes, to the notebook and back
check       in a few bytes each, to be compared between ranks
entries     what of them is compared: `model.fc.weight`, `loader.batch_size`
copying     for a rank that was replaced
handover    from a rank to others, by a broadcast
"""
