"""Claims of lesson 11: checked in its kernel after the named cells."""

# %% cell-07
assert lessons.check("11/pairs", program.answer) and program.value == [4.0, 4.0, 4.0]

# %% cell-11
assert session["found"][0] == {"in .grad": False, "in the context": True}

# %% cell-15
assert forgotten == {"here": None, "worker1": None, "y wants a gradient": True, "y knows from where": None}

# %% cell-18
assert two[-1] < 0.3 * two[0] and max(abs(a - b) for a, b in zip(two, one, strict=True)) < 1e-3

# %% cell-25
assert staleness("patient") == 0
assert lessons.check("11/staleness", trainers - 1)

# %% cell-25 time
assert abs(staleness("eager") - (trainers - 1)) < 0.5 * trainers

# %% cell-27 time
assert max(slow) > others
assert seconds("eager, one is slow") < seconds("patient, one is slow")

# %% cell-30
assert session["wrong"][0]["with a lock"] == (0, 0)

# %% cell-33
assert "modified by an inplace operation" in session["outcome"][0]

# %% cell-36
assert all(of[-1] < 0.5 * of[0] for of in losses.values())
assert set(session["are_equal"].values()) == {True}, "DDP keeps the dense layers equal"

# %% cell-46
_verdict = lessons.check("11/bounded", session["outcome"][0])
assert _verdict, _verdict
assert not lessons.check("11/bounded", [True] * 5)

# %% puzzle-solved
assert puzzle, puzzle
