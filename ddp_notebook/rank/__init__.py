"""All that runs inside a rank. Imports nothing of the notebook's side.

process             the rank's process: its main thread forms groups and runs cells
engine              that main thread's kernel, ipyparallel's, made before there is a controller
own_signals         the session's signals, which a cell can neither replace nor block
agent               a thread that answers the notebook even while the main thread is stuck
files               its files, for the notebook to fetch
threads             how many it has
reserve             file descriptors and memory that a rank holds back for its own work
shortage            resources that the rank has run out of, in sentences
pymp                the folder of sockets of `multiprocessing`, which is removed with the rank
gpu                 whether it uses one, and when that may be asked
imports             does something right after a module was imported, and nothing before
hooks               the places where features add to what the core does, and the list of features
faults              what goes wrong in it because somebody has asked for it
remote_calls        remote calls as data, which `rpc` writes and `record` sends
patching            a function of a library's, replaced in every module that has it
hide_from_profiler  what is ours does not show in the user's profiles and traces

cell/               one cell, with everything that ipykernel does around one
group/              process groups: their operations seen, compared, freed, formed anew
rpc/                calls between ranks, in cells that are run again
sharding/           what the rank holds of models that are spread over ranks
resize/             what is done where the ranks get more or fewer
survive/            training that goes on when a rank dies
record/             what the rank does, as rows
script/             a rank of torchrun's, which a notebook may look at
variables/          its variables: as bytes, compared, copied
"""
