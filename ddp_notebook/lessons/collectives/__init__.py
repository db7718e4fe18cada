"""Results and costs of collectives.

explorer  predict a collective, run it on the ranks, compare
theory    results of each collective, computed with NumPy
written   the code of the cell that runs a collective, as shown to the reader
costs     measured times over several sizes, and the alpha-beta model
"""
