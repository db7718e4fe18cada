"""Process groups on a rank: their operations seen, compared, freed, and their connections made anew.

network            ties the rest together
join               takes a place in the default group
arguments          checks the arguments of `init_process_group` by torch's own code
local_collectives  answers operations without other ranks
recorder           every collective, send and receive, as it happens
kernels/           run before torch's operators, and tell it of each call
calls              one of them: its operator, its group, what is kept of it
operators          torch's operators, and what their arguments mean
call_site          whose call it is, and from which line
modules            which module it is for, where DTensor and tensor parallel call
sequences          the same of a step whose forward was not marked
guard/             do all ranks call the same?
release            ends what the main thread waits in
waiting            waits in C++ that Python's interrupt can end
connections/       gloo's connections: known, cut, and made anew behind the groups
deferred_destroy   destroyed groups live on for a while
stores             clients of the session's store
authentication     MACs for pickles that travel over gloo
cell_progress      how far a rank has come: optimizer steps, gradients averaged
cpp_log            what torch's C++ side writes about connections that were cut
"""
