"""Debuggers in which ranks have stopped: one prompt for all of them.

feature          declaration of the feature and of `%ddp_debug`
debugging        the feature in a session
prompts          the prompt of a cell: which ranks it is for, and what is sent to them
prompt_line      reads one line of the user while the cell's output goes on
commands         syntax of `@2 p x`
failures         opens the failure of the last cell
"""
