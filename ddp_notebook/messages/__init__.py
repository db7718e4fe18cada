"""Messages between processes: every kind of them, one encoding, one framing, one way to dispatch them.

encoding          the binary form of a message, made from the types of its fields
framing           frames on a stream of bytes: messages, and the text and cells of ranks
dispatch          the table from a kind of messages to its handler
keeper            between a keeper, which has the ranks of a kept session, and its notebooks
hosts             between a host server and its owner
processes         startup messages for the processes that a host server starts
first_messages    the first message of a connection or of a started process, as a line of text
outposts          between the outpost of a job and the notebook that it calls
ranks             between the notebook and its ranks; further ones, each about one subject:
script_abort      what a script of torchrun's waits in
faults            something is to go wrong on a rank
files             files of ranks
resize_messages   more or fewer ranks
survive_messages  a cell that goes on when a rank dies in it
record_options    what a cell records, and where its profile goes

A message is a frozen dataclass with a name that no other message has. Whatever carries it (a ZeroMQ socket, a pipe, the
standard streams of an ssh, a Unix socket) gets its frames and knows nothing of its content.
"""
