"""A folder of the notebook's on hosts that do not share it: which files go, which are there already, and their sending.

selection  which of them are sent
upload     the files of one host, in pieces, through the stream to its host server
sync       all hosts at once, and what is said about it

The other end is `launch.host.files`.
"""
