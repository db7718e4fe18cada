"""All variables of a rank at a glance, for `%ddp_whos`.

feature  handles the messages
rows     a row per variable: type, shape, bytes
digests  digests of contents, sampled or complete
"""
