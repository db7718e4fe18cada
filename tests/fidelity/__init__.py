"""torch and Python report the same about a program on ranks as without this package.

program         a program that queries all of these reports
test_fidelity   runs it on bare ranks and in a cell
"""
