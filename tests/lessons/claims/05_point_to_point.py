"""Claims of lesson 05, checked in its kernel after the named cells."""

# %% cell-09 time
assert seconds[0] > 0.3 > seconds[1], seconds

# %% cell-09
assert session["got"][1] == [7.0, 7.0, 7.0]

# %% cell-14
assert called < total, (called, total)

# %% cell-19
assert session["changed"][1] == [100.0, 100.0]

# %% cell-22
assert session["fixed"][1] == [0.0, 0.0]

# %% cell-26
assert session["senders"][0] == list(range(session.world_size - 1, 0, -1))

# %% cell-30
assert session["by_tag"][1] == [1.0, 2.0]

# %% cell-35
assert set(session["alive"].values()) == {session.world_size}

# %% cell-42
assert verdict, verdict
assert not lessons.check("05/shift", {rank: float(rank) for rank in range(session.world_size)})

# %% everyone-solution
assert lessons.check("05/everyone", along_a_chain)
