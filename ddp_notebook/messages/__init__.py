"""Messages between processes: their types, encoding, framing and dispatch.

encoding          encodes a message by the types of its fields
framing           frames on a byte stream: messages, text of ranks, and input of ranks
dispatch          table from message types to handlers
keeper            between a keeper, which owns the ranks of a kept session, and its notebooks
hosts             between a host server and its owner
processes         startup messages for the processes that a host server starts
first_messages    the first message of a connection or of a started process, as a line of text
outposts          between the outpost of a job and the notebook that it connects to
ranks             between the notebook and its ranks; further messages to ranks are in the modules below
script_abort      aborts the operation that a torchrun script waits in
debug_messages    holds time limits while a debugger waits, and describes failed cells
faults            injects a fault into a rank
files             reads files of ranks
resize_messages   changes the number of ranks
twice_messages    runs a cell twice from the same state
survive_messages  for a training loop that continues after the death of a rank
completion_messages  names and help for a cell of ranks
mesh_messages     coordinates of a rank in meshes
whos_messages     lists the variables of a rank
record_options    recording options of a cell, and the path of its profile

A message is a frozen dataclass with a unique name. Its transport (a ZeroMQ socket, a pipe, the standard streams of an
ssh, a Unix socket) carries its frames and does not interpret them.
"""
