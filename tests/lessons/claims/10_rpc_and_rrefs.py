"""Claims of lesson 10: checked in its kernel after the named cells."""

# %% cell-07
assert session["ran_on"][0] == [1, 1, 1] and lessons.check("10/runs-on", 1)
assert session["transports"][0] == ["TENSORPIPE"]

# %% cell-11
_asked = [call for call in program.calls if call.function.endswith("select_action")]
assert lessons.check("10/select-action", program.answer) and len(_asked) == 2 * (n - 1)
assert {call.src for call in _asked} == set(range(1, n)) and {call.dst for call in _asked} == {0}

# %% cell-15
assert lessons.check("10/messages", references.answer) and references.value == [0.0, 1.0, 2.0, 3.0]
assert {reference.owner for reference in references.references} == {1, n - 1}

# %% cell-18
assert session["total"][0] == 10 and where == f"worker{n - 1}"

# %% cell-22 time
assert session["seconds"][0] < 0.7, session["seconds"]

# %% cell-26
_added = [call for call in batching.calls if call.function == "add"]
assert lessons.check("10/first-add", batching.answer)
assert len(_added) == 2 * (n - 1) and all(values == [11 * (n - 1)] * 2 for values in batching.value)

# %% cell-29
assert runs["answer_one"][1] == 48 * (n - 1) == 16 * runs["answer_in_batches"][1]
assert session.pull("difference", ranks=0)[0] < 1e-5

# %% cell-36
assert asked == 12 * (n - 1) and lessons.check("10/agent-calls", asked)
assert early < 0.4 and late > 0.7, (early, late)

# %% cell-45
assert session["deep"][0] == 10

# %% cell-56
_verdict = lessons.check("10/sum-by-calls", session["came"])
assert _verdict, _verdict
assert not lessons.check("10/sum-by-calls", {rank: rank + 1 for rank in range(n)})

# %% puzzle-solved
assert puzzle, puzzle
