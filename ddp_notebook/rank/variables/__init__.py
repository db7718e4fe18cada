"""Variables of a rank.

values      serialization and one-line description, for the notebook
between     tasks between two steps of a running cell
summary     small summaries, to compare ranks
comparison  entries of variables that are compared: `model.fc.weight`; tensors that may differ between ranks by design
copying     copies variables to a replaced rank
snapshot    a copy of all variables that is restored in place
samplers    adapts data samplers to the current number of ranks
random_states  states of the random number generators
meshes      coordinates of this rank in the device meshes of its variables
owners      modules that hold a parameter
handover    broadcasts variables from one rank to others
static_lookup  finds the value of a path without running code of the user
"""
