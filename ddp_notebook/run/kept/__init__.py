"""Kept sessions, which outlive their notebook, in a notebook that attaches to one. `launch/keep` has the keeper.

feature          declares `%ddp_attach`
recovered_cells  cells of an earlier notebook, whose output the keeper has stored
foreign_cells    running cells of another notebook, for a notebook that only observes
"""
