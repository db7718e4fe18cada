"""Claims of lesson 02, checked in its kernel after the named cells."""

# %% cell-32
assert lessons.check("02/pushed", "NameError") and "NameError: name 'learning_rate' is not defined" in seen

# %% cell-33
assert set(session["learning_rate"].values()) == {0.01}

# %% cell-37
assert sorted(weights) == list(range(session.world_size)) and weights[0].shape == (3, 100)

# %% cell-48
assert all(total.tolist() == [session.world_size] for total in session["total"].values())

# %% best-solution
assert lessons.check("02/largest", solution), solution
assert "dots" in lessons.check("02/largest", best_rank).reason

# %% flags-check
assert "dots" in lessons.check("02/flags", session["flag"]).reason

# %% flags-solution
assert lessons.check("02/flags", session["flag"])

# %% spread-check
assert "dots" in lessons.check("02/spread", spread).reason

# %% spread-solution
_verdict = lessons.check("02/spread", spread_in_one_call)
assert _verdict, _verdict
