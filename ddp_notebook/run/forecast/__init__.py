"""Prediction of step times on other numbers of ranks.

feature  declares `%ddp_forecast`
"""
