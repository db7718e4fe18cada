"""What each collective does and costs.

explorer  predicted, run on the ranks, compared
theory    what each collective gives, in NumPy
written   the cell that a collective is run by, as it is shown
costs     measured times over sizes, and the alpha-beta model
"""
