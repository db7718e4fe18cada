"""Claims of lesson 27: checked in its kernel after the named cells."""

# %% bug-01-check
assert not lessons.bug(1).check()

# %% bug-05-check
assert not lessons.bug(5).check()
assert [_one.cause for _one in session.verify().findings] == ["bypassed"]

# %% bug-08-check
assert not lessons.bug(8).check()
assert session.verify().findings

# %% cell-984
_verdict = lessons.check("27/skip", "solution")
assert _verdict, _verdict
