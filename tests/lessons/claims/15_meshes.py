"""Claims of lesson 15: checked in its kernel after the named cells."""

# %% cell-06
assert lessons.check("15/row", session["row"][1])

# %% cell-13
_recorded = {key: sum(sizes) for key, sizes in ways(hybrid_calls).items()}
assert {way for way, op in _recorded if op.startswith(("all_gather", "reduce_scatter"))} == {"row"}
assert {way for way, op in _recorded if op == "all_reduce"} <= {"column"}
assert session["rows"][0] == 1 or _recorded["column", "all_reduce"] < _recorded["row", "reduce_scatter"]

# %% cell-18
assert off < 1e-12

# %% cell-22
assert lessons.check("15/share", session["share"][0])

# %% cell-25
assert off < 1e-12

# %% mesh-view
for _way in ("HSDP", "TP and FSDP"):
    assert lessons.mesh(way=_way).run().is_same

# %% cell-32
assert all(abs(session["wrong"][rank] - session["true"][rank]) > 1e-3 for rank in range(n))

# %% cell-33b
_mistakes = session.check("model").mistakes
assert len(_mistakes) == session["rows"][0] and all("different inputs" in one for one in _mistakes)

# %% more-run
assert all(session["neighbours"][rank]["data"] == [rank] or n < 4 for rank in range(n))

# %% devices-run
assert len({round(float(one.sum()), 9) for one in session["own"].values()}) == 1, "DDP averages on all ranks"

# %% cell-35
assert lessons.check("15/shape", (2, 4)) and not lessons.check("15/shape", (4, 2))

# %% cell-43
_verdict = lessons.check("15/coordinates", dict(enumerate(session["solution"][0])))
assert _verdict, _verdict
assert session["solution"][0] == [session["place"][rank] for rank in range(n)], "the same as in the mesh"

# %% puzzle-solved
assert puzzle, puzzle
