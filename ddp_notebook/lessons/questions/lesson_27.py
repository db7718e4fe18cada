"""Questions of lesson 27: find the bug."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

_ALL = "every rank makes the same calls as often as the others"

QUESTIONS: dict[str, Question] = {
    "27/bug-01": Question(
        answer="only rank 0 calls all_reduce",
        why="accuracy() adds up the right answers of all ranks, but only rank 0 calls it. Call it on all ranks, and "
        "print on "
        "rank 0.",
        hint="Which line did the other ranks not run?",
        traps={
            "the ranks have unequal data": "All ranks have as many images in each step.",
            "the model is not in DDP": "It is; and the training steps have ended.",
        },
        choices=("only rank 0 calls all_reduce", "the ranks have unequal data", "the model is not in DDP"),
    ),
    "27/bug-02": Question(
        answer="one rank skips a step alone",
        why="the rank that catches the error makes one backward less. Its later gradients meet those of other steps, "
        "and at "
        "the end the others wait. All ranks must decide together, by one number.",
        hint="How many backwards does each rank make?",
        traps={
            "the memory is full": "It was, for one batch of one rank. Why do the other ranks wait?",
            "zero_grad is in the wrong place": "Its place changes no call.",
        },
        choices=("the memory is full", "one rank skips a step alone", "zero_grad is in the wrong place"),
    ),
    "27/bug-03": Question(
        answer="rank 0 has one batch more",
        why="one image more than the ranks can share gives rank 0 a fifth batch. Cut all shares to the same number of "
        "batches, use DistributedSampler, or Join.",
        hint="How many batches does each rank have?",
        traps={
            "the last batch is smaller": "DDP does not compare sizes of batches. Their number counts.",
            "the batch size is too small": "Any batch size can have this problem.",
        },
        choices=("the last batch is smaller", "rank 0 has one batch more", "the batch size is too small"),
    ),
    "27/bug-04": Question(
        answer="the ranks send other metrics first",
        why="the dictionaries have another order. Calls are matched by their order, so the accuracy of rank 0 is "
        "added to the "
        "loss of rank 1. Loop over sorted(metrics).",
        hint="Which number of rank 1 is added to the first number of rank 0?",
        traps={
            "the division is wrong": "A mean is the sum over the number of ranks.",
            "no_grad changes the loss": "It only keeps no graph.",
        },
        choices=("the division is wrong", "the ranks send other metrics first", "no_grad changes the loss"),
    ),
    "27/bug-05": Question(
        answer="the forward goes past DDP",
        why="model.module is the network inside DDP. Without a forward of DDP, its backward averages nothing.",
        hint="Compare the weights of the ranks. Which call should keep them equal?",
        traps={
            "the learning rate is too large": "Then the loss would not fall.",
            "the ranks began with other weights": "They all set the same seed, and DDP sends the weights of rank 0.",
        },
        choices=("the learning rate is too large", "the forward goes past DDP", "the ranks began with other weights"),
    ),
    "27/bug-06": Question(
        answer="all ranks read the same batches",
        why="all ranks set the same seed before they shuffle. The mean of equal gradients is one of them. A "
        "DistributedSampler gives each rank its share.",
        hint="What is the sum of the first batch on each rank?",
        traps={
            "the network is too slow": "Then each epoch would take longer than on one GPU.",
            "the batch size is too small": "It is that of the program for one GPU.",
        },
        choices=("the network is too slow", "all ranks read the same batches", "the batch size is too small"),
    ),
    "27/bug-07": Question(
        answer="the optimizer has the old parameters",
        why="fully_shard replaces the parameters by sharded ones. An optimizer that was made before still has the "
        "old ones. Make "
        "it afterwards.",
        hint="Which tensors does the optimizer step, and which does the model use?",
        traps={
            "the gradients are not averaged": "FSDP averages them. But who uses them?",
            "the learning rate is too small": "It was right with DDP.",
        },
        choices=(
            "the gradients are not averaged",
            "the optimizer has the old parameters",
            "the learning rate is too small",
        ),
    ),
    "27/bug-08": Question(
        answer="the loss is a sum, not a mean",
        why="DDP divides by the number of ranks, but not by the number of samples. With a sum, the gradient grows "
        "with the "
        "batch of a rank. The learning rate of the paper is for a mean.",
        hint="By which factor do the gradients differ from those of one process?",
        traps={
            "DDP adds gradients, it does not average": "It averages: %ddp_verify finds a factor that comes from the "
            "loss.",
            "the ranks have the same batch": "Each takes its own 16 samples.",
        },
        choices=(
            "DDP adds gradients, it does not average",
            "the ranks have the same batch",
            "the loss is a sum, not a mean",
        ),
    ),
    "27/bug-09": Question(
        answer="set_epoch is missing",
        why="DistributedSampler shuffles by its seed and its epoch. Without set_epoch the epoch is always 0.",
        hint="Compare the order of two epochs.",
        traps={
            "shuffle must be in the DataLoader": "A DataLoader with a sampler must not shuffle; the sampler does.",
            "each rank needs its own seed": "With other seeds the shares of the ranks would overlap.",
        },
        choices=("shuffle must be in the DataLoader", "set_epoch is missing", "each rank needs its own seed"),
    ),
    "27/bug-10": Question(
        answer="no name of the checkpoint fits",
        why="the names of a DDP model begin with 'module.', and strict=False accepts that none fits. Remove the "
        "prefix, and be "
        "strict.",
        hint="Print the names of the checkpoint and those of the network.",
        traps={
            "DDP overwrites the weights": "DDP sends those of rank 0, which should be the loaded ones.",
            "the learning rate destroys them": "The weights are wrong before the first step.",
        },
        choices=("DDP overwrites the weights", "the learning rate destroys them", "no name of the checkpoint fits"),
    ),
    "27/bug-11": Question(
        answer="rank 0 draws a picture in each step",
        why="every step waits for the slowest rank. Work that only rank 0 does slows down all of them: do it seldom, "
        "or in the "
        "background.",
        hint="Which rank do the others wait for, and what does it do alone?",
        traps={
            "the gradients are too large to send": "They have 3 kB.",
            "the batch is too small": "It is small, but the report names another cause.",
        },
        choices=(
            "the gradients are too large to send",
            "the batch is too small",
            "rank 0 draws a picture in each step",
        ),
    ),
    "27/bug-12": Question(
        answer="only rank 0 calls new_group",
        why="new_group must be called by all ranks of the default group, also by those that are not in the new one.",
        hint="Which function needs all ranks although its name does not say so?",
        traps={
            "the group has too many ranks": "A group may have all ranks.",
            "the file is too slow": "No file is read before the hang.",
        },
        choices=("the group has too many ranks", "only rank 0 calls new_group", "the file is too slow"),
    ),
    "27/questions": Question(
        answer={
            "program 1": "who is missing?",
            "program 2": "who has caught an error?",
            "program 3": "who has less data?",
            "program 12": "who is missing?",
        },
        why="each hang is a rank that does not come; the questions are those for the reason.",
        hint=f"Look for the line at which {_ALL} is not true any more.",
        choices=("who is missing?", "who has caught an error?", "who has less data?"),
    ),
    "27/alone": Question(
        answer={"program 4": "no", "program 6": "no", "program 9": "yes", "program 10": "yes"},
        why="a sampler without set_epoch repeats its order with one process too, and the names of a DDP checkpoint "
        "do not fit "
        "there either. Programs 4 and 6 are wrong only because other ranks exist.",
        hint="Run the program in your head with world_size = 1.",
        choices=("yes", "no"),
    ),
}

PUZZLES: dict[str, Puzzle] = {
    "27/skip": Puzzle(
        setup="""
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
network = nn.Linear(8, 2)
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
batches = []
for _ in range(7):
    batches.append((torch.randn(4, 8, generator=generator), torch.randint(0, 2, (4,), generator=generator)))
for x, y in batches[:3]:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
batches = batches[3:]
if rank == world_size - 1:
    batches[1][0][0, 0] = float("nan")
""",
        call="solution(model, optimizer, batches)",
        got="[int(result), all(bool(p.isfinite().all()) for p in network.parameters())]",
        wanted="[3, True]",
        targets=(Target(measure=COLLECTIVES, most=4),),
        why="the mean of a gradient that is not a number is not a number on any rank. So all ranks see it, and "
        "decide the same.",
        hint="DDP already sends something in each step that shows the bad batch to all ranks.",
        wrong_hint="Take the three good steps on all ranks, leave out the bad one on all ranks, and return 3.",
    ),
}
