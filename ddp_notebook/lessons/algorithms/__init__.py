"""Algorithms made of sends and receives.

stepping  one step at a time on the ranks
plans     what each has to move, from its formulas
"""
