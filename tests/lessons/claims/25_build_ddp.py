"""Claims of lesson 25: checked in its kernel after the named cells."""

# %% cell-18 time
_verdict = lessons.check("25/overlap", "Hooks")
assert not _verdict and "the result is right" in repr(_verdict), "the bits of DDP, and too many calls"

# %% cell-30 time
_verdict = lessons.check("25/overlap", "Buckets")
assert _verdict, _verdict
