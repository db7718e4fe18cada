"""What torch and Python tell a user of a program is what they tell on ranks without us.

program         a program that asks them all
test_fidelity   it runs on bare ranks and in a cell
"""
