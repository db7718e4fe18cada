"""Claims of lesson 25: checked in its kernel after the named cells."""

# %% cell-18
for _name in ("Naive", "Flat", "Hooks"):
    assert "the result is wrong" not in repr(lessons.check("25/overlap", _name)), "the bits of DDP"
for _name in ("Naive", "Flat"):
    assert not lessons.check("25/overlap", _name), "nothing is hidden"

# %% cell-18 time
assert not lessons.check("25/overlap", "Hooks")

# %% cell-30 time
_verdict = lessons.check("25/overlap", "Buckets")
assert _verdict, _verdict
