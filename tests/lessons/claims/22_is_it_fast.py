"""Claims of lesson 22: checked in its kernel after the named cells."""

# %% cell-08 time
assert 1.25 < session["one"][0] / max(session["two"].values()) < 1.6

# %% cell-11 time
assert 0.75 < session["one"][0] / max(session["both"].values()) < 0.9

# %% cell-16
_alpha, _beta = fit({4: 20e-6 + 4 / 1e9, 4e3: 20e-6 + 4e3 / 1e9, 4e6: 20e-6 + 4e6 / 1e9})
assert abs(_alpha / 10e-6 - 1) < 1e-6 and abs(_beta / 1e9 - 1) < 1e-6

# %% cell-29
assert session["large"][0] > 1.3 * session["small"][0], "a larger batch with the same learning rate"
assert session["scaled"][0] < 1.15 * session["small"][0], "linear scaling"
assert session["warmed"][0] < 1.15 * session["small"][0], "linear scaling with warmup"

# %% cell-45
_verdict = lessons.check("22/lighter", "solution")
assert _verdict, _verdict
