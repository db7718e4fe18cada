"""Claims of lesson 09, checked in its kernel after the named cells."""

# %% cell-09
assert "first.weight" in backward.buckets[-1].parameters and lessons.check("09/first-bucket", "last")
assert not backward.agreement.agrees, "gradients should still be local"

# %% cell-13
import numpy as np

local = np.array([reduction.before[rank] for rank in range(n)])  # (n, 6)
for rank in range(n):
    np.testing.assert_allclose(reduction.after[rank], local.mean(axis=0), rtol=1e-5, atol=1e-8)
assert rest[-1].agreement.agrees and construction.agreement.agrees

# %% cell-15
gradients = plain.gradients  # gradients of last.bias by rank: local before the all-reduce, mean after
mean = np.mean([gradients[rank].local.first for rank in range(n)], axis=0)
for rank in range(n):
    np.testing.assert_allclose(gradients[rank].synchronised.first, mean, rtol=1e-4, atol=1e-7)
assert plain.agreement.agrees and len(plain.buckets) == 3

# %% one-bucket
assert len(one_bucket.buckets) == 1

# %% cell-21
nbytes = plain.sent_bytes
assert nbytes == sum(bucket.nbytes for bucket in plain.buckets) == small.sent_bytes == seldom.sent_bytes
assert half.sent_bytes == nbytes / 2 and low_rank.sent_bytes < 0.03 * nbytes
np.testing.assert_allclose(slow.losses[0], plain.losses[0], rtol=1e-4)
np.testing.assert_allclose(small.losses[0], plain.losses[0], rtol=1e-6)
as_16_bits = half.gradients[0].synchronised.first.astype(np.float16)
np.testing.assert_array_equal(as_16_bits, half.gradients[0].synchronised.first)  # the sent values fit in 16 bits
assert not np.array_equal(as_16_bits, slow.gradients[0].synchronised.first)
assert all(run.agreement.agrees for run in ddp.runs), "in every run the ranks have equal weights"

# %% cell-42
np.testing.assert_allclose(threads["losses"], losses, rtol=1e-9)  # DataParallel equals one device with the whole batch
together = np.mean([processes[rank]["losses"] for rank in range(n)], axis=0)
np.testing.assert_allclose(together, losses, rtol=1e-9)  # and so does DDP
assert totals[0] > 1.2 * max(totals[1:]) and len({sum(one.values()) for one in ddp_memory.values()}) == 1
assert dp_moved[0] == sum(dp_moved[1:]), "all that moves goes through the default device"
only = [part for part in ("optimizer state", "outputs") if all(part not in one for one in dp_memory[1:])]
assert only == ["optimizer state", "outputs"] and dp_memory[0]["batch"] == n * dp_memory[1]["batch"]

# %% cell-44
peaks = session.pull("peaks", 0)[0]
assert not peaks or peaks[0] > max(peaks[1:]), "the default GPU needs the most"

# %% cell-52
for rank in range(n):
    np.testing.assert_allclose(session["solution"][rank], session["wanted"][rank], rtol=1e-9)
assert lessons.check("09/accumulate", sent_per_step())
