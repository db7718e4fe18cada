"""Claims of lesson 19: checked in its kernel after the named cells."""

# %% cell-10
assert lessons.check("19/next-step", of_agent["next step"]), of_agent
assert lessons.check("19/who-restarts", of_agent["new processes"]), of_agent

# %% cell-14
assert lessons.check("19/joined", len({row["pid"] for row in rows_of(folder) if row["world_size"] == 3}))
assert all(change["steps again"] >= 0 for change in members) and members[-1]["ranks"] == "3 to 2", members

# %% cell-23
assert of_session["new processes"] == 1 and of_session["steps again"] <= 1, of_session

# %% cell-23 time
assert of_session["seconds"] < of_agent["seconds"], (of_session, of_agent)

# %% cell-35
assert [(change["ranks"], change["steps again"]) for change in resized] == [("1 to 3", 0), ("3 to 2", 0)], resized
assert [change["new processes"] for change in resized] == [2, 0], resized

# %% cell-45
_verdict = lessons.check("19/images", judged())
assert _verdict, _verdict

# %% puzzle-solution
assert puzzle, puzzle
