"""Questions before a result, and exercises with a checked answer.

questions     checks an answer and explains the verdict
judging       rules for the verdict
catalogue     the questions of all lessons, from the modules `lesson_NN`: one for each lesson, with its questions
asking        asks a question
guesses       reads a guess and keeps it
ask_box       the widget of a question
results       displays a result after the guess
answers_file  the reader's answers on disk
progress      tables of the kept answers
puzzles       runs a solution on the ranks, and judges it by targets
measures      what a target limits: bytes, calls, memory, exposed communication
starters      finds out that the reader has not changed an exercise's code
puzzle_ranks  the code of puzzles on the ranks
returned      measures that a run returns itself
saving_ranks  the code of a puzzle about checkpoints on the ranks
"""
