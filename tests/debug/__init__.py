"""The debugger of ranks.

test_commands     unit tests: which ranks get a line
test_clock        unit tests: the clock of time limits
test_breakpoint   `breakpoint()` and others in cells, in a notebook
test_dead_rank    a rank that dies while another is at the prompt
test_post_mortem  `%ddp_debug` and `%debug` after a failed cell
test_front_end    breakpoints in the margin, in a notebook
test_vscode       the debugger of VS Code, by messages that it has sent
test_library      a library that opens a debugger, and cells on some ranks (long)
test_kept         a kept session whose notebook dies at the prompt (long)
test_two_hosts    ranks on two hosts: limits, stops, and the lease (long)
test_front_end_two_hosts  breakpoints in the margin there (long)
test_without_user nbclient and papermill, where no user can type (long)
test_held         time limits that a debugger holds, one test per operation (long)
driver            a user at the prompt
front_end         the debugger of a front end
vscode            VS Code, which sends its recorded messages (vscode_messages.json)
"""
