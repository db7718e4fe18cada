"""Programs about training, in three tables: wrong ones, right ones, and deliberate ones that look wrong.

The session names the cause of the programs in `wrong.md`, and reports nothing about those in `right.md`. It may report
those in `deliberate.md`, and does not call them wrong.

program      a program of a table, with a random place for its fault
runner       runs a table in a session, and counts what the session has reported
test_tables  runs a sample of each table, and whole tables as long tests
"""
