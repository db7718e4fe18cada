"""Claims of lesson 13: checked in its kernel after the named cells."""

# %% cell-08
assert lessons.check("13/ddp", held("DDP"))
assert not lessons.check("13/ddp", 8.4)

# %% cell-15
assert lessons.check("13/sharded", found)

# %% cell-23
assert lessons.check("13/all-gathers", all_gathers), all_gathers

# %% cell-29
for _way, _each in formula.items():
    assert abs(held(_way) / (numel * _each / MB) - 1) < 0.03, _way

# %% options-result
assert abs(bytes_of("bfloat16", "all-gather") / bytes_of("reshard", "all-gather") - 0.5) < 0.01
assert bytes_of("bfloat16", "reduce-scatter") == bytes_of("reshard", "reduce-scatter")
assert held("bfloat16") == held("FSDP")

# %% options-activations
assert large["checkpoint"][0].activations < 0.6 * large["keep all"][0].activations
assert large["checkpoint"][0].peak < large["keep all"][0].peak

# %% cell-33
assert max(session["losses"][0]) - min(session["losses"][0]) < 1e-6

# %% cell-35
assert "no model uses" in session.check("optimizer").mistakes[0]

# %% cell-41
assert verdict, verdict

# %% puzzle-solved
assert puzzle, puzzle
