"""Runs cells on a rank.

inbox             pipe from which the rank reads cells
runner            runs one cell, with everything that ipykernel does around it
interpreter       restores the state of the Python interpreter after a cell
needed_modules    restores functions of modules after the event loop or IPython failed
isolation         operations that a cell must not perform, and objects that it must not leave
signal_handlers   signals of the session, and SIGINT and SIGTERM from other processes
internal_phases   phases in which the main thread runs code of this package only
background_code   user code that runs outside of cells, and may start operations
current_line      current position of the main thread in the user's code
streams           text on the pipes behind fd 1 and 2, and the marks in it
tracebacks        which traceback ends the cell, and the maximum length of tracebacks
magic_errors      raises the errors that the IPython magics only show, such as those of a script under %run
transforms        transformation of a cell's text by IPython, with unchanged line numbers
exceptions        handles exceptions of user code without trusting them
truncation        truncates output that is too long to read
stdin             `input()` and `getpass()`, forwarded to the notebook
widget_comms      the rank's half of widgets
outgoing          flow control for displays and widget messages
commands          shell commands of a cell: without the rank's variables, installations once per host
children          the child process that the main thread waits for
script_functions  `init_process_group` and `spawn`, as scripts call them
kernel_api        all private interfaces of ipykernel and ipyparallel that a rank needs
"""
