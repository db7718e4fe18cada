"""Claims of lesson 08, checked in its kernel after the named cells."""

# %% why-result
assert all(one["average"] < 1e-12 < 0.01 < one["alone"] for one in off.values()), off

# %% cell-12
assert set(session["once"].values()) == {True}, "an image is missing, or in two shares"
assert set(session["sizes"].values()) == {(1258, 359, 180)}


# %% cell-26
def is_equal(name, reference="DDP"):
    return bool(distance(name, reference).max() < 1e-12)


equal = {
    "average gradients": is_equal("average gradients"),
    "average parameters after each step": is_equal("average parameters after each step"),
    "average parameters before each step": is_equal("average parameters before each step"),
    "average parameters after each step, Adam": is_equal("average parameters after each step, Adam", "DDP, Adam"),
}
assert lessons.check("08/equal", equal), equal
# Three ranks with 42 images each are not exactly one process with 128.
assert is_equal("one process") and is_equal("average parameters, momentum", "DDP, momentum")
assert distance("average parameters before each step").max() > 1e-3
assert distance("average parameters after each step, Adam", "DDP, Adam").max() > 1e-3

# %% cell-32
sampled = {name: np.array(losses) for name, losses in session["sampled"][0].items()}
assert lessons.check("08/dealt", session["all_dealt"][0])
assert set(session["twice"].values()) == {-1253 % n} and set(session["forgotten"].values()) == {0}
assert set(session["other_order"].values()) == {True}
assert abs(sampled["DDP"] - sampled["by hand"]).max() < 1e-12

# %% cell-40
assert session["solution_off"][0] < 1e-12 and session["plain_off"][0] > 1e-4

# %% one-call-solution
assert lessons.check("08/one-call", average_flat)
