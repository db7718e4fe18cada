"""Training steps, and waits between ranks.

run        numbers of a training run that every display shares
steps      breakdown of step times, on each rank
cycles     begin and end of steps
waits      waits in collectives, and stragglers
pipelines  steps of a pipeline schedule, and the ideal schedule without message times
"""
