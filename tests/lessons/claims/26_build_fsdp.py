"""Claims of lesson 26: checked in its kernel after the named cells."""

# %% cell-06
_n = session.world_size
assert session["gathered"][1].tolist() == [_one * 10**_rank for _rank in range(_n) for _one in range(1, _n + 1)]
assert session["part"][1].tolist() == [2 * sum(10**_rank for _rank in range(_n))]

# %% cell-16
_verdict = lessons.check("26/sharded", "Gathered")
assert not _verdict and "the result is right" in repr(_verdict), _verdict

# %% cell-28
_verdict = lessons.check("26/sharded", "Solution")
assert _verdict, _verdict
