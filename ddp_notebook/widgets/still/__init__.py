"""Static forms of a live view.

saved_summary  a line of text with the result, and a picture
saved_page     the monitor and its data on one page, without a kernel
"""
