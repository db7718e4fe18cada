"""What stays of a live view.

summary     a line of text that states the result, and a picture
page        the monitor with its data on one page, without a kernel
"""
