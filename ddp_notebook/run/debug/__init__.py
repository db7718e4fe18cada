"""Debuggers in which ranks have stopped: one prompt for all of them, or the debugger of the front end.

feature          declaration of the feature and of `%ddp_debug`
debugging        the feature in a session
prompts          the prompt of a cell: which ranks it is for, and what is sent to them
prompt_line      reads one line of the user while the cell's output goes on
commands         syntax of `@2 p x`
front_end        the front end's debugger: its requests, and the events of ranks
kernel_debugger  the debugger of this notebook's kernel
rank_adapters    debugpy on the ranks: requests and responses
adapter_ids      numbers of threads, frames and variables
variable_groups  variables of the ranks as groups, while no thread has stopped
cell_sources     files of cells, and lines of their breakpoints
failures         opens the failure of the last cell
"""
