"""Consistency checks between ranks.

agreement      compares the ranks' answers about their variables: `%ddp_check`
differences    entries that differ between ranks, and the size of the differences
disagreements  mistakes that no single rank can notice
importance     order of findings: variables of the last training cell first
sentences      descriptions of equal entries and of those that were not compared
"""
