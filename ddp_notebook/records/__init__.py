"""Recorded data and its vocabulary, shared by the notebook and the ranks.

    schema       tables of recorded rows
    codec        serialization of a batch of rows, with a checksum
    renumbering  marker in a recording for new rank numbers
    operation    description of a collective, send or receive
    meaning      purpose of the collectives of FSDP, DTensor and DDP
    threads      sentences about two threads that use one group
    words        sets of ranks and places in programs as text
    phases       phases in which a rank runs code of this package only
    names        names chosen by users, as messages show them
    error_text   text of an error, without running code of the user
    shortages    sentences about exhausted resources of a process
    units        numbers with units as text
    clocks       identity of a process's monotonic clock
    logs         target of `ddp_notebook.log` in this process
    switches     features that a test has disabled
    marker       names of temporary files, and the file with which a host recognizes the notebook's folder

The notebook and the ranks import this package. It imports code of neither.
"""
