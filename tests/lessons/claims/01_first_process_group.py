"""Claims of lesson 01, checked in its kernel after the named cells."""

# %% result-sum
assert all(lessons.check("01/sum", value) for x in session["x"].values() for value in x.tolist())

# %% result-seen
assert all(lessons.check("01/seen", share) for share in session["share"].values())
assert len({tuple(one) for one in session["first_images"].values()}) == session.world_size

# %% cell-13
assert len({losses[4] for losses in session["losses"].values()}) == session.world_size, "different losses"

# %% cell-18
assert all(parameters_equal.values()), "the ranks' parameters are not the same"
assert min(accuracy.values()) > 0.95, "the test accuracy is not above 95 %"

# %% mean-check
assert "dots" in lessons.check("01/mean-loss", is_right).reason

# %% mean-solution
_mean = sum(losses[-1] for losses in session["losses"].values()) / session.world_size
assert all(abs(_one - _mean) < 1e-5 for _one in session["mean_loss"].values())

# %% sums-check
assert "dots" in lessons.check("01/one-call", three_sums).reason

# %% sums-solution
_verdict = lessons.check("01/one-call", sums_in_one_call)
assert _verdict, _verdict
