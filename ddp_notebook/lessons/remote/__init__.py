"""Calls to other ranks, and remote references.

rpc_program  one program: guess, run it on the ranks, step through its recording
scenes       the programs: explanation, question, and the answer from the recording
programs     the code that the ranks run
questions_by_calls  a network on worker0, for a puzzle
"""
