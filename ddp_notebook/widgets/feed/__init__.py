"""What of a recording travels to the browser, and when.

feed              follows a recording: what is new, and all that is there for a view that opens late
messages          what a view gets, and the texts behind its numbers
tables            the tables that travel: their columns, and how they are packed
table_rows        rows of a recording as rows of these tables
whole_steps       which steps are whole on all ranks, and what their time went into
timeline          which spans and calls travel, and when
remote            which remote calls travel, and when
values            which values of tensors travel
courses           which rows of metrics travel: the lowest and the highest of neighbours
budget            what is left out where there is too much
browser_requests  what a view asks for beside that: a window, a step, the values of a collective
"""
