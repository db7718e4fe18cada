"""Algorithms made of sends and receives.

stepping  runs an algorithm step by step on the ranks
plans     bytes and messages of each algorithm, from formulas
"""
