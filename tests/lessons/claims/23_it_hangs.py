"""Claims of lesson 23: checked in its kernel after the named cells."""

# %% cell-09
assert session["right"][0].item() == sum(30 + _rank for _rank in range(session.world_size))

# %% cell-12
assert float(session.peek("dist.constants.default_pg_timeout.total_seconds()", 0)[0]) == 1800

# %% cell-17
assert "all_reduce(SUM, float32[1])" in same_order() and "rank 1 calls barrier()" in same_order()

# %% cell-24
_n = session.world_size
_means = [0.0, 1 + 1 / _n, 2 + 1 / _n]  # rank 1 is one step ahead
assert [_key for _key in where] == [(_rank, 3) for _rank in range(_n)]
assert all(abs(_one - _mean) < 1e-6 for _found in where.values() for _one, _mean in zip(_found, _means, strict=True))

# %% cell-26
assert session["means"] == {_rank: [0.0, 2.0, 3.0] for _rank in range(session.world_size)}

# %% cell-20
assert "Rank 1 failed to pass monitoredBarrier" in "".join(said)
assert sum("recorder" in _line for _line in said) == 2
assert "[4] scheduled; gloo:all_reduce [5] scheduled; gloo:all_reduce [6]" in "".join(said), "rank 0 has a third call"
assert sum("Detected mismatch between collectives on ranks" in _line for _line in about_mismatch) == 2
assert "Received data size doesn't match expected size" in "".join(said), "gloo has ended a process"

# %% cell-52
_verdict = lessons.check("23/agree", "solution")
assert _verdict, _verdict
