"""What is recorded, and the words and units in which both sides speak of it.

    schema       what a rank records, as tables
    codec        a batch of records as bytes, with its checksum
    renumbering  that ranks have other numbers from here on
    operation    a collective, send or receive in words and numbers
    meaning      what the collectives of FSDP, DTensor and DDP are for
    words        sets of ranks in words
    names        names that users choose, as messages show them
    shortages    resources that a process has run out of, in sentences
    units        numbers with their units
    clocks       which clock a process has
    logs         where `ddp_notebook.log` of this process goes
    switches     features that a test has switched off
    marker       names of files that are there for a while only, and of one by which a host sees the notebook's folder

Both sides import this package; it imports neither.
"""
