"""Claims of lesson 26: checked in its kernel after the named cells."""

# %% cell-06
assert session["gathered"][1].tolist() == [1, 2, 10, 20] and session["part"][1].tolist() == [22]

# %% cell-16
_verdict = lessons.check("26/sharded", "Gathered")
assert not _verdict and "the result is right" in repr(_verdict), _verdict

# %% cell-28
_verdict = lessons.check("26/sharded", "Solution")
assert _verdict, _verdict
