"""The notebook's part of running cells: send them, wait, show output, and recover from failures.

cells/            cells: sent, waited for and ended, one at a time
jobs/             cells in the background
output/           output in the notebook: merged, labelled, live
groups/           waiting ranks and dead ranks; forming the group again
values/           push and pull variables
files/            copy files from the notebook to hosts, and from ranks to the notebook
lint/             checks of a cell's collectives before it is sent
consistency/      compares variables across ranks
faults/           injected faults
twice/            a cell that runs twice from the same state
debug/            prompts of debuggers in which ranks have stopped
resize/           more or fewer ranks
survive/          cells that continue when a rank dies
divergence/       where the paths of ranks through a cell diverged
kept/             sessions that outlive their notebook
verify/           one training step, compared with one process
sharding/         placement and memory of sharded models
forecast/         prediction of step times on other numbers of ranks
findings/         silent mistakes in the training steps of cells
nan/              where NaN began, and cells that stop there
completion/       Tab and Shift-Tab in cells of ranks
whos/             all variables of the ranks in one table
record/           options of the recording, and the recording so far

session_parts     creates and connects the parts of a session
message_handlers  table from the kind of a message to its handler
rank_requests     questions to ranks, and their answers
rank_sets         parser of sets of ranks such as `--ranks 0,2-3`
session_hooks     the hooks by which features extend a session
features          the features of the notebook, and their declarations
ended_recording   the recording of the last ranks, for magics after their end
magic_lines       declarations of the lines of most magics
magic_help        texts of `%ddp_help`
debugging         `%debug` in the notebook after an error of this package
auto              sends plain cells to the ranks, for `%ddp_auto`
hints             a line below the traceback of a cell that was meant for the ranks
progress          progress line
interrupted       messages for interrupted commands
call_arguments    message for a wrong argument of a call
notebook_kernel   kind of this process: a notebook's kernel or a script
"""
