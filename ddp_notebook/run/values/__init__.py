"""Variables sent between the notebook and its ranks.

exchange        pulls variables by name, and pushes values
transfers       transfers large data; a transfer ends when its rank dies or stop is pressed
values_by_rank  values by rank, as returned to the user
"""
