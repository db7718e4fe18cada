"""The keeper: the process that owns the ranks of a kept session.

process          starts the ranks, accepts notebooks, and ends the session
notebooks        attached notebooks, and the driving one
request_handler  handles requests of notebooks, with their permissions
rank_events      stores messages of ranks, and sends them to notebooks
journal          messages of ranks that no notebook has shown yet
queue            waiting jobs, which also start after their notebook has left
"""
