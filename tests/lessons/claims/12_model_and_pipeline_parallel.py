"""Claims of lesson 12: checked in its kernel after the named cells."""

# %% cell-05
assert all(session["is_same"].values())

# %% cell-11
assert one.is_same, "the gradients are those of one process"
assert lessons.check("12/one-batch", (n - 1) / n) and lessons.check("12/one-batch", one.even)

# %% cell-15
assert several.is_same and several.even < one.even
assert lessons.check("12/bubble", (n - 1) / (2 * n + n - 1)) and lessons.check("12/bubble", several.even)

# %% cell-19
assert turns.is_same and abs(turns.even - several.even) < 1e-9
assert several.in_flight == {rank: 2 * n for rank in range(n)}
assert turns.in_flight == {rank: n - rank for rank in range(n)}

# %% cell-24
assert looped.is_same and zero.is_same
assert looped.even < turns.even and zero.even < turns.even

# %% balance-result
assert units == {"equal": 3 * (3 * n - 1), "slow": 3 * (4 * n + n - 1)}, units
assert all(one["is right"] == 1 for name in ("equal", "slow") for one in session[name].values())

# %% cell-32
assert set(session["alive"].values()) == {float(n)}

# %% cell-38
assert done == order_solved(n, 2 * n), done
_verdict = lessons.check("12/order", order_solved(n, 2 * n))
assert _verdict, _verdict

# %% puzzle-solution
assert puzzle, puzzle
