"""Claims of lesson 07, checked in its kernel after the named cells."""

# %% cell-06
assert lessons.check("07/server-bytes", at_server)

# %% cell-11
total = [sum(before[rank][chunk] for rank in range(n)) for chunk in range(n)]
whole = {rank: [c for c in range(n) if (ring.chunks[rank][c] == total[c]).all()] for rank in range(n)}
assert whole == {rank: [(rank + 1) % n] for rank in range(n)}, "one complete chunk on each rank after N - 1 steps"

# %% cell-15
assert same and ring.steps == 2 * (n - 1)
assert set(ring.bytes_moved.values()) == {2 * (n - 1) * 48 // n}, "each rank sends 2 (N - 1) / N of its data"

# %% cell-19
assert max(session["difference"].values()) < 1e-6 * n, session["difference"]

# %% cell-23
assert (of_chunks, bytes_sent()) == (2 * (n - 1) * 48 // n, (n - 1) * 48)
assert max(session["difference"].values()) < 1e-6 * n

# %% halving-picture
for one in (tree, halving):
    assert one.agrees and one.steps == 2 * (n - 1).bit_length(), one

# %% cell-34
largest = max(costs.sizes)
assert costs.through["parameter server"][0] == 2 * (n - 1) * largest
assert set(costs.through["ring all_reduce"].values()) == {2 * 2 * (n - 1) * largest // n}  # received and sent
# Sleeping takes at least as long as the simulated link needs, on any machine.
for name, fit in costs.fit.items():
    for nbytes, seconds in costs.of(name).items():
        assert seconds > 0.95 * (0.002 * fit.messages + fit.bytes_factor * nbytes / 100e6), (name, nbytes, seconds)

# %% cell-39
assert lessons.check("07/ring-bytes", 700) and not lessons.check("07/ring-bytes", 7 * 400)

# %% ring-solution
assert lessons.check("07/ring", "ring_all_reduce")
