"""Claims of lesson 22: checked in its kernel after the named cells."""

# %% cell-08 time
_speedup = 48 / (48 / n + 1 + 10 * (n - 1) / n)
assert 0.86 * _speedup < session["one"][0] / max(session["divided"].values()) < 1.1 * _speedup

# %% cell-11 time
_efficiency = 48 / (48 + 1 + 10 * (n - 1) / n)
assert 0.9 * _efficiency < session["one"][0] / max(session["whole"].values()) < 1.07 * _efficiency

# %% cell-16
_alpha, _beta = fit({_size: 2 * (n - 1) * (10e-6 + _size / n / 1e9) for _size in (4, 4e3, 4e6)})
assert abs(_alpha / 10e-6 - 1) < 1e-6 and abs(_beta / 1e9 - 1) < 1e-6

# %% cell-29
assert session["large"][0] > 1.3 * session["small"][0], "a larger batch with the same learning rate"
assert session["scaled"][0] < 1.15 * session["small"][0], "linear scaling"
assert session["warmed"][0] < 1.15 * session["small"][0], "linear scaling with warmup"

# %% cell-45
_verdict = lessons.check("22/lighter", "solution")
assert _verdict, _verdict
