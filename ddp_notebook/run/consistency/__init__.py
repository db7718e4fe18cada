"""Consistency checks between ranks.

agreement         compares the ranks' answers about their variables, and orders the findings: `%ddp_check`
differences       entries that differ between ranks, and the size of the differences
disagreements     mistakes that no single rank can notice
compared_entries  equal entries and those that were not compared, as text
"""
