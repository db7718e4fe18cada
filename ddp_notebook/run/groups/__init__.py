"""The ranks as one group: what they wait in, and how they come together again.

looks       what each rank is doing: asked of it, or found out
diagnosis   who waits for whom, in one sentence: the text of the hang card
mend        after a cell that failed: must the group be formed anew?
healing     replacing ranks that died, and giving them the variables of a living one
"""
