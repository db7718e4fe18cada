"""Find collectives in a cell that cannot work, before the cell is sent.

warnings      compares the collectives that the ranks would reach
statements    reads a cell for one rank, statement by statement
callees       effect of a function call on a rank
expressions   values of expressions on one rank
branches      state of the reader for one rank, and both branches of a test
known_values  known and unknown values
groups        collectives of torch, and the position of their group argument
"""
