"""Cells that go on when a rank dies in them (`ddp_notebook.survive`).

feature         declares what this adds to a session
survived_cells  replacing ranks that died while their cell runs, and saving before a machine is taken away
"""
