"""Modules that run inside a rank. They import nothing of the notebook's side.

process             the rank's process: its main thread forms groups and runs cells
engine              the ipyparallel engine of the main thread; it needs no controller
own_signals         the session's signals; a cell can neither replace nor block them
agent               the thread that answers the notebook even while the main thread is stuck
files               lists and reads the rank's files for the notebook
thread_count        the number of threads of torch and NumPy
reserve             file descriptors and memory that the rank holds back for its own work
shortage            sentences about exhausted resources
pymp                the socket folder of `multiprocessing`, which is removed with the rank
gpu                 whether the rank uses a GPU, and when a thread may query it
imports             calls a function right after a module was imported
hooks               the hooks of features in the core, and the list of features
faults              faults that `%ddp_fault` injects
remote_calls        remote calls as data: `rpc` writes them, `record` sends them
patching            replaces a library function in every module that imported it
hide_from_profiler  hides our operators from the user's profiles and traces

cell/          runs one cell, with everything that ipykernel does around a cell
group/         process groups: observe, compare, abort and reconnect their operations
rpc/           calls between ranks, in cells that can run again
sharding/      the rank's shards of distributed models
torch_errors/  the catalogue of torch's errors, with cause and fix
twice/         a cell that runs twice from the same state
resize/        changes the number of ranks
verify/        one training step, compared with one process
completion/    names and help for cells of ranks
whos/          all variables of the rank
debug/         debugger in cells, and for failed ones
survive/       training that continues when a rank dies
findings/      facts about training steps, for findings
record/        records the rank's activity as rows
script/        a rank of a torchrun job, to which a notebook can attach
variables/     the rank's variables: serialized, compared, copied
"""
