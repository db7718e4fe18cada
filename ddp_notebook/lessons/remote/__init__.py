"""Calls to other ranks, and references to what they have.

rpc       one program: guess, run it on the ranks, step through the picture of what was recorded
scenes    the programs: what each shows, what is asked of it, and what the recording answers
programs  what the ranks run
"""
