"""Claims of lesson 21: checked in its kernel after the named cells."""

# %% cell-04
assert all(losses[-1] < losses[0] for losses in session["losses"].values())

# %% load-result
_others = [_weight for _rank, _weight in session["weight"].items() if _rank]
assert len(set(_others)) == 1 and session["weight"][0] < 0.7 * _others[0]

# %% cell-16
assert all(_one["losses"] == session["losses"][_rank] for _rank, _one in results().items())

# %% cell-19
assert {_one["environment"]["LOCAL_RANK"] for _one in results().values()} <= {"0"}
assert all(_one["environment"]["RANK"] == str(_rank) for _rank, _one in results().items())

# %% cell-44
_verdict = lessons.check("21/log", "solution")
assert _verdict, _verdict
