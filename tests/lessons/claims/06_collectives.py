"""Claims of lesson 06, checked in its kernel after the named cells."""

# %% cell-09
assert explorer.agrees and explorer.right == {rank: [rank == 0] * 2 for rank in everybody}
n = session.world_size

# %% cell-14
assert session["b"] == {rank: [0, 0] for rank in everybody}
assert session["s"] == {rank: [100 + rank] for rank in everybody}

# %% cell-17
assert session["gathered"][0] == [rank + 1 for rank in everybody]
assert session["reduced"][0] == sum(rank + 1 for rank in everybody)

# %% cell-21
assert all(explorer.agrees for explorer in pictures.values())
for rank in everybody:
    assert session["all_gather"][rank] == [10 * r for r in everybody]
    assert session["reduce_scatter"][rank] == [sum(10 * r + rank for r in everybody)]
    assert session["all_to_all"][rank] == [10 * r + rank for r in everybody]

# %% cell-26
assert max(session["off"].values()) < 1e-5 * n and all(session["equal_bits"].values())

# %% tensor-forms
assert all(session["same"].values())

# %% cell-31
assert session["by_rule"][0] == session["by_rule"][1]
assert lessons.check("06/reduce-op", {key: session["by_rule"][1][key] for key in ("MAX", "MIN", "PRODUCT")})

# %% plain-torch
assert plain.count("other dtype: rank") == 2 and "other size: rank" in plain, plain
assert "has [2.0, 2.0]" not in plain and "has [2, 2]" not in plain, plain

# %% cell-36
assert set(session["alive"].values()) == {n}

# %% cell-44
assert lessons.check("06/mean", session["mean"])
assert not lessons.check("06/mean", session["mean_of_means"])
which = ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"]
assert lessons.check("06/which", dict(zip(my_choice, which, strict=True)))

# %% agree-check
assert "dots" in lessons.check("06/agree", session["stop"]).reason

# %% agree-solution
assert lessons.check("06/agree", session["stop"])

# %% statistics-solution
assert lessons.check("06/statistics", three_sums)
