"""Cells that continue when a rank dies (`ddp_notebook.survive`).

feature         declares the part in a session
survived_cells  replaces dead ranks while their cell runs, and saves before a preemption
"""
