"""Claims of lesson 28: checked in its kernel after the named cells."""

# %% cell-02
assert abs(model.parameters / 70.55e9 - 1) < 0.001, "the size of Llama 3 70B"

# %% cell-08
_plan = lessons.plan(shard=16, recompute=True)
assert not _plan.fits and abs(_plan.memory()[0].value / 70.55e9 - 1) < 0.001

# %% cell-11
_eight, _sixteen = lessons.plan(tensor=8, shard=2, recompute=True), lessons.plan(tensor=16, recompute=True)
assert _sixteen.time()[1].value > 2 * _eight.time()[1].value

# %% cell-23
assert not lessons.check("28/plan", my_plan)

# %% cell-26
_verdict = lessons.check("28/plan", solution)
assert _verdict, _verdict
