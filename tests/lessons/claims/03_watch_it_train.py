"""Claims of lesson 03, checked in its kernel after the named cells."""

# %% result-first-loss
assert all(lessons.check("03/first-loss", float(losses.of_rank(rank)[1][0])) for rank in range(session.world_size))

# %% result-others time
_fast, _slow = session.recording.runs()[-2:]
assert _slow.step_ns > 280e6 > 1.5 * _fast.step_ns, (_fast, _slow)

# %% cell-17 time
assert found is not None and found.rank == slow, "the report names another rank than the one that sleeps"
assert found.phase == "forward", "it sleeps in its forward"

# %% cell-21
assert last < 0.75 * first, "it has learnt nothing"

# %% steps-check
assert "dots" in lessons.check("03/steps", my_steps).reason
assert set(session["steps_done"].values()) == {130} and lessons.check("03/steps", 130)

# %% slow-solution time
assert lessons.check("03/slow-rank", solution)

# %% memory-check
assert "dots" in lessons.check("03/memory", mean_loss).reason

# %% memory-solution
_verdict = lessons.check("03/memory", mean_of_numbers)
assert _verdict, _verdict
