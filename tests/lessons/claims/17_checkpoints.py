"""Claims of lesson 17: checked in its kernel after the named cells."""

# %% cell-10
assert lessons.check("17/share", share), share

# %% cell-15
assert session["numbers"][0] == 48 * 96 + 96 + 96 * 24 + 24 and session["numbers"][1] == 0

# %% cell-23
for _size in (fewer, more):
    assert max(abs(np.array(later[_size]) - after)) < 1e-3

# %% async-result
assert set(session["first"].values()) == {30} and all(session["is_same"].values())

# %% data-result
assert set(session["is_complete"].values()) == {True}
assert all(one == {"naive": 20, "with the position": 0} for one in session["twice"].values())

# %% cell-32
assert lessons.check("17/next-step", next_step) and session["step"][0] == next_step
assert kept == [rank for rank in range(n) if rank != 1] and left == []

# %% cell-39
_verdict = lessons.check("17/to-the-bit", session.pull("solution", 0)[0])
assert _verdict, _verdict

# %% puzzle-solved
assert puzzle, puzzle
