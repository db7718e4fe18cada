"""The process that has the ranks of a kept session.

process          starts them, and ends with its time
notebooks        who is there, and who drives
request_handler  what each may ask, and how it is done
rank_events      what ranks say: kept, and told to notebooks
journal          what they have said and nobody has shown yet
queue            jobs that wait for their turn, also when their notebook has gone
"""
