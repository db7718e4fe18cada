"""Claims of lesson 16: checked in its kernel after the named cells."""

# %% cell-08
assert who == list(range(n)) and lessons.check("16/who-skips", "all")
assert set(session["scale"].values()) == {2.0**11}

# %% cell-11
assert session["skipped"][1] == [3] and session["skipped"][0] == []
assert session["losses"][0][-1] != session["losses"][0][-1], "nan on the other ranks"

# %% cell-15
assert lessons.check("16/messages", session["messages"][0]), session["messages"]
assert set(session["same"].values()) == {True}, "the gradient is the same in all three"

# %% cell-20
assert session["steps"] == {rank: 3 + rank for rank in range(n)}
assert all((weights[rank] == weights[0]).all() for rank in range(n)), "all ranks have the weights of the last one"

# %% cell-23
_plain, _forgotten, _kept = (of_all("curves", name)[-10:].mean() for name in session["curves"][0])
assert abs(_kept - _plain) < abs(_forgotten - _plain), "kept entries are sent later and are not lost"

# %% bytes-result
assert abs(session["nbytes_hook"][0] / (moved(n)[0] * session["nbytes_whole"][0]) - 1) < 0.01
assert abs(moved(20)[0] - moved(20)[1]) < 1e-9

# %% cell-28
assert averaged == [8, 16, 24, 32], averaged
assert lessons.check("16/times", 32 / len(averaged))
assert apart_of_4.max() < apart.max(), "ranks that average more often drift less"

# %% cell-36
assert verdict, verdict

# %% puzzle-solved
assert puzzle, puzzle
