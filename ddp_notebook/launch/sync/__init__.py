"""Upload a notebook's folder to hosts that do not share it: select files, compare them, and send them.

selection  selects the files to send
upload     sends the files of one host in pieces, through the stream to its host server
sync       sends to all hosts in parallel, and describes the result

The other end is `launch.host.files`.
"""
