"""Variables between the notebook and its ranks.

exchange   pulled by name, pushed by value
transfers  large ones: they end with their rank, and with the stop button
values     what the user holds: one value per rank
"""
