"""One cell on a rank.

inbox             where cells come in
runner            one cell, with everything that ipykernel does around one
interpreter       the state of Python's interpreter, put back after a cell
isolation         what a cell may not do to its rank, and what it may not leave behind
signal_handlers   the session's interrupt, and signals that come from elsewhere
current_line      what the main thread is in, in the user's words
streams           text on the pipes behind fd 1 and 2, and the marks in it
tracebacks        which belong to the cell's end, and how long they may be
magic_errors      raises the errors that IPython's magics only show, such as those of a script under %run
transforms        what IPython makes of a cell's text, whose lines keep their numbers; mostly nothing
exceptions        the user's exceptions, handled without trusting them
truncation        what is too long to be read is cut before it is sent
stdin             `input()` and `getpass()`, asked in the notebook
widget_comms      the rank's half of widgets
outgoing          displays and widget messages, as many as the notebook takes
commands          what a cell gives to the shell: without the rank's variables, and installations once per host
children          the child process that the main thread waits for
script_functions  scripts' own `init_process_group` and `spawn`
kernel_api        every private interface of ipykernel and ipyparallel that a rank needs
"""
