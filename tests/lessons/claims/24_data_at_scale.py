"""Claims of lesson 24: checked in its kernel after the named cells."""

# %% cell-08
assert total("whole") == {_number: 2 * n for _number in range(24)}

# %% cell-11
assert total("once") == {_number: 1 for _number in range(24)}

# %% cell-16
assert {len(_used) // 4 for _used in session["used"].values()} == {4}

# %% cell-19
assert total("used").total() == 16 * n and max(total("used").values()) == 1

# %% cell-25
assert set(session["given"].values()) == {24}

# %% cell-28
assert total("both") == {_number: 1 for _number in range(40 * n)}

# %% cell-32 time
_times = session["times"][0]
assert _times[2] < 0.75 * _times[0]

# %% cell-36
assert all(_crops == session["crops"][0] for _crops in session["crops"].values())

# %% cell-45
_verdict = lessons.check("24/assign", "solution")
assert _verdict, _verdict
