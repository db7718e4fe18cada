"""What stays of a live view.

saved_summary  a line of text that states the result, and a picture
saved_page     the monitor with its data on one page, without a kernel
"""
