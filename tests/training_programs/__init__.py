"""Programs about training, in three tables: wrong ones, right ones, and deliberate ones that look wrong.

program     a program of a table, with a random place for its fault
wrong       wrong programs: the session names the cause
right       right programs: the session reports nothing
deliberate  programs that do something unusual on purpose: the session may report it, and does not call it wrong
test_tables runs samples, and whole tables as long tests
runner      runs a table in a session, and counts what the session has reported
"""
