"""Selects the parts of a recording for the browser, and the time to send them.

feed              follows a recording: messages with new rows, and snapshots for views that open late
messages          the messages to a view, and their numbered texts
tables            the tables in messages: their columns, and their packed form
table_rows        converts rows of a recording to rows of these tables
whole_steps       steps that are complete on all ranks, and how their time was spent
timeline          selects spans and calls, and the time to send them
rpc_bars          selects remote calls, and the time to send them
value_selection   selects values of tensors
courses           selects rows of metrics: the lowest and the highest of neighbours
budget            thins data above a rate limit
browser_requests  answers requests of a view: a window, a step, the values of a collective
"""
