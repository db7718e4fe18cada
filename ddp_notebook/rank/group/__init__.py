"""Process groups on a rank: observe and compare their operations, abort them and reconnect the groups.

network            connects the other modules
join               takes a place in the default group
arguments          checks the arguments of `init_process_group` with torch's own code
local_collectives  completes operations without other ranks
recorder           observes every collective, send and receive
kernels/           kernels before torch's operators, which report each call to the recorder
calls              one call: its operator, its group and its recorded data
operators          torch's operators, and the meaning of their arguments
call_site          the calling line, and the library that made the call
modules            the module that a call of DTensor or tensor parallel belongs to
sequences          the same for steps whose forward was not observed
guard/             compares calls between ranks before they start
release            releases the main thread from a blocked wait
waiting            replaces waits in C++ by waits that Python's interrupt can end
held_time          clock of time limits, which a debugger stops
connections/       gloo connections: track, close, and reconnect them without new group objects
collective_owners  objects that collectives belong to: FSDP's groups of parameters, DDP models
calling_threads    threads that call collectives of one group
deferred_destroy   keeps destroyed groups alive for a while
stores             clients of the session's store
authentication     MACs for pickles that are sent over gloo
cell_progress      the rank's progress: optimizer steps, averaged gradients
cpp_log            suppresses torch's C++ messages about closed connections
"""
