"""The tested versions, each combination in a separate environment: `make test-matrix`.

environments   the combinations, and their packages
build          creates an environment; torch is in a folder that environments share
colab.txt, kaggle.txt  the packages installed there, with date and source
__main__       runs the tests in each, and updates the table in `tests/benchmarks/RESULTS.md`
"""
