"""`%%ddp_twice`: a cell runs twice from the same state, and the two runs are compared.

feature  declares `%%ddp_twice`
twice    runs the cell twice, restores the state, and finds the first difference
"""
