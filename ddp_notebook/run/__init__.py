"""Cells on the ranks, as the notebook's side runs them: sending, waiting, showing, and what follows when one fails.

cells/            one cell after the other: sent, waited for, ended
jobs/             cells in the background
output/           what comes back, in the notebook: folded, labelled, live
groups/           who waits for whom; ranks that died, and their group formed anew
values/           variables there and back
files/            the notebook's files to hosts, and those of ranks to the notebook
lint/             collectives that cannot work, found before a cell is sent
consistency/      whether ranks hold the same
faults/           faults that the user injects
resize/           more or fewer ranks
survive/          cells that go on when a rank dies in them
kept/             sessions that outlive their notebook
sharding/         who holds which part of a model, and the memory that it takes
record/           what cells record, and the recording up to now

session_parts     the parts of a session, put together
message_handlers  a table: the kind of a message, and who handles it
rank_requests     questions to ranks, and their answers
rank_sets         sets of ranks as people write them: `--ranks 0,2-3`
session_hooks     the places where features add to a session
features          the features of the notebook, and what they declare
ended_recording   the recording of the last ranks, for magics after their end
magic_lines       the declarations of most magics' lines
magic_help        the texts of `%ddp_help`
debugging         what is said in place of a debugger after an error of this package
hints             a line under the traceback of a cell that was meant for the ranks
progress          a line that tells how far something is
interrupted       what an interrupt of a command says
call_arguments    the sentence about a wrong argument of a failed call
notebook_kernel   what this process is: a notebook's kernel or a script
"""
