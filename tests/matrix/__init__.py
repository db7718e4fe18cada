"""The versions that ddp_notebook is tested with, each combination in an environment of its own: `make test-matrix`.

environments   which combinations there are, and what is installed in each
build          makes an environment; torch lies in a folder that environments share
colab.txt, kaggle.txt  what is installed there, with date and source
__main__       runs the tests in each and keeps the table in `tests/benchmarks/RESULTS.md`
"""
