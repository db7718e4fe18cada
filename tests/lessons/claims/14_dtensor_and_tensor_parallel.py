"""Claims of lesson 14: checked in its kernel after the named cells."""

# %% cell-06
assert lessons.check("14/shape", session["shape"][0])

# %% cell-16
assert all(off < 1e-12 for off in session["off"].values())
assert lessons.check("14/collectives", {name: calls[0] for name, calls in together.items()})

# %% product-view
_found = {}
for _name, _how in list(cases.items())[:3]:
    _of_a, _of_b = _how.split(", ")
    _found[_name] = lessons.product(_of_a, _of_b).run().answer
assert lessons.check("14/collectives", _found), _found

# %% cell-21
assert max(session["off"].values()) < 1e-12 and set(sums) == {"all_reduce"}
assert lessons.check("14/sums", len(sums))

# %% cell-24
assert max(session["off"].values()) < 1e-12 and halves == ["all_gather", "reduce_scatter"]

# %% cell-28
assert all(len({round(one, 3) for one in factors}) > 1 for factors in session["factors"].values())

# %% cell-33
assert max(session["off"].values()) < 1e-12, "the same as with all experts on every rank"
assert lessons.check("14/tokens", sum(row[0] for row in session["badly"].values()))

# %% cell-39
assert max(session["off"].values()) < 1e-12
assert lessons.check("14/passes", session["passes"][0])

# %% causal-result
assert max(session["off"].values()) < 1e-12
_pieces, _zigzag = session["in_pieces"], session["zigzag"]
assert lessons.check("14/causal", {"rank 0": _pieces[0]["blocks"], "the last rank": _pieces[n - 1]["blocks"]})
assert len({one["pairs"] for one in _zigzag.values()}) == 1, "the same work on all ranks"
assert sum(one["pairs"] for one in _zigzag.values()) == sum(one["pairs"] for one in _pieces.values())

# %% cell-46
assert session["solution_off"][0] < 1e-12

# %% puzzle-solved
assert puzzle, puzzle
