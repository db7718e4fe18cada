"""Questions of lesson 20: is my training right?."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "20/bypassed": Question(
        answer="together, parts",
        why="DDP did not average the gradients, so each rank kept the gradient of its part. The loss is right.",
        hint="Which module does the loss call, and does DDP take part in that forward?",
        traps={
            "parts, whole": "The average of the parts is right here. Do the ranks compute that average?",
            "none": "Then both ranks would have the same weights, and the same accuracy.",
        },
    ),
    "20/unequal": Question(
        answer={"differ": "parts, whole", "times": 3},
        why="each part counts one half, so an image counts 1/96 on rank 0 and 1/32 on rank 1, where one process counts "
        "1/64.",
        hint="DDP averages correctly. How much does a part of 48 images count in that average, and one of 16?",
    ),
    "20/same-batch": Question(
        answer="none",
        why="the batch has each image twice, and its mean has the same gradient. Only the images themselves show the "
        "mistake.",
        hint="Compare the losses of the two ranks. What is the mean over a batch that contains each image twice?",
        traps={"together, parts": "DDP averages as it should: model(x) is called."},
    ),
    "20/two-mistakes": Question(
        answer={"scale": "together, parts", "sum": "parts, whole"},
        why="DDP does not average a parameter outside of it. And each part divides by the images of all parts, before "
        "DDP divides by the number of ranks.",
        hint="Which parameters does DDP average? And by how many images does one process divide, and by how many does "
        "the average of the ranks?",
    ),
    "20/repaired": Question(
        answer=[],
        why="no finding is left.",
        hint="Put the scale into the module that DDP gets, and let each rank take the mean over its own images.",
        traps={
            ("outside",): "The loss is right now. DDP does not know the scale.",
            ("sum",): "The scale is right now. DDP divides by the number of ranks once more.",
        },
    ),
}
