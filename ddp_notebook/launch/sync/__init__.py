"""A folder of the notebook's on hosts that do not share it: which files go, which are there already, and their sending.

listing   the files of a folder that git would not ignore
choice    which of them are sent
plan      what is to be done about each, by what is there already
sending   the files of one host, in pieces, through the stream to its host server
crew      something done for all hosts at once
sync      all hosts at once, and what is said about it

The other end is `launch.host.files`.
"""
