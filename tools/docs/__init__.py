"""The documentation site: what `make docs` makes.

    __main__    the command, and Sphinx
    notebooks   the notebooks, executed
    replays     what the ranks did, to be played with: the recording of a training, the lessons
    sources     what Sphinx reads: the repository's texts, the pages of docs/, the executed notebooks
    fresh       whether something has to be made again

What takes long is kept in build/docs/ and made again when the code or the notebook has changed.
"""
