"""All variables of the ranks at a glance: `%ddp_whos`.

feature    declaration
listing    asks the ranks
variables  the table: each variable once, and how it differs between ranks
"""
