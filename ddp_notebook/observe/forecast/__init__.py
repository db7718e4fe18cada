"""Prediction of step times on other numbers of ranks.

network   cost of collectives on a network, and a fit of its rate and latency to a recording
timeline  communication of recorded steps, without the time that ranks were blocked in it
forecast  the predicted steps, compared with the recording
"""
