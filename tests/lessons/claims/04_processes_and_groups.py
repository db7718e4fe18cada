"""Claims of lesson 04, checked in its kernel after the named cells."""

# %% cell-07
assert session["length"] == {rank: 1 for rank in pids}
assert len({*pids.values(), os.getpid()}) == session.world_size + 1, "all ranks and the notebook are processes"
assert lessons.check("04/boxes", session["length"][0])

# %% cell-13
assert session["numbers"] == {
    rank: [rank, rank, session.world_size, session.world_size] for rank in range(session.world_size)
}

# %% cell-25
assert set(session["answers"].values()) == {session.world_size}, "every rank has answered"

# %% cell-30
assert lessons.check("04/evens-and-odds", session["within"])
assert lessons.check("04/world-size", 24) and not lessons.check("04/world-size", 3)

# %% cell-33
_verdict = lessons.check("04/neighbours", session["pair_sum"])
assert not _verdict and "dots" in _verdict.reason

# %% places-solution
_verdict = lessons.check("04/places", [solution_of_place(rank) for rank in range(24)])
assert _verdict, _verdict
assert "dots" in lessons.check("04/places", [place(rank) for rank in range(24)]).reason

# %% cell-35
_verdict = lessons.check("04/neighbours", session["pair_sum"])
assert _verdict, _verdict

# %% pids-check
assert "dots" in lessons.check("04/pids", all_pids).reason

# %% pids-solution
_verdict = lessons.check("04/pids", pids_by_a_tensor)
assert _verdict, _verdict
