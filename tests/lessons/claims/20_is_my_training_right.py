"""Claims of lesson 20: checked in its kernel after the named cells."""

# %% cell-11
assert checked["right"].is_right

# %% cell-18
assert lessons.check("20/bypassed", "together, parts")
assert [one.cause for one in checked["first"].findings] == ["bypassed"], checked["first"]

# %% cell-28
assert lessons.check("20/unequal", "parts, whole") and lessons.check("20/times", 3)
assert [one.cause for one in checked["second"].findings] == ["unequal"], checked["second"]

# %% cell-38
assert lessons.check("20/same-batch", "none")
assert [one.cause for one in checked["third"].findings] == ["same_batch"], checked["third"]

# %% cell-54
_verdict = lessons.check("20/repaired", judged())
assert _verdict, _verdict

# %% puzzle-solved
assert puzzle, puzzle
