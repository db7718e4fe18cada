"""Claims of lesson 18: checked in its kernel after the named cells."""

# %% cell-13
assert abs(together - alone).max() < 0.02

# %% cell-21
_lower = "theirs" if theirs[-20:].mean() < ours[len(theirs) - 20 : len(theirs)].mean() else "ours"
assert lessons.check("18/lower", _lower), (theirs[-20:].mean(), ours[len(theirs) - 20 : len(theirs)].mean())
assert lessons.check("18/worst", int(np.argmax(their_by_position))), their_by_position
assert np.mean(by_position[-8:]) < by_position[0] - 0.2, "more context, less loss"
assert np.mean(their_by_position[:-1]) < 1, "all positions but the last see the answer"

# %% cell-29
assert lessons.check("18/second-attempt", steps[again]), steps
assert difference.max() < 0.1

# %% cell-33
assert difference.max() < 0.1 and struck.exists()

# %% cell-36
assert difference.max() < 0.02 and session["mine"] == session["of_adam"]
assert sum(session["mine"].values()) == session["whole"][0]

# %% cell-43
_verdict = lessons.check("18/sees-future", session["found"][0])
assert _verdict, _verdict

# %% puzzle-solved
assert puzzle, puzzle
