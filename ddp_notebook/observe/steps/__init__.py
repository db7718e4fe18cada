"""Training steps, and who waited in them.

run        a training run in the numbers that every display of it shares
steps      what the time of a step went into, on each rank
cycles     where steps begin and end
waits      who waited for whom in a collective, and which rank is slow again and again
pipelines  the steps of a pipeline's schedule, and what they would be if messages took no time
"""
