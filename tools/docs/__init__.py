"""The documentation site, as `make docs` builds it.

    __main__    the command, and the call of Sphinx
    notebooks   executes the notebooks
    replays     interactive pages: the recording of a training run, the lessons
    reference   the reference pages of magics and options
    sources     input of Sphinx: the texts of the repository, the pages of docs/, the executed notebooks
    fresh       detects outputs that are out of date

Slow outputs are kept in build/docs/ and made again after a change of the code or the notebook.
"""
