"""Questions of lesson 21: from notebook to script."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question
from ddp_notebook.lessons.questions.measures import COLLECTIVES, SENT
from ddp_notebook.lessons.questions.puzzles import Puzzle, Target

QUESTIONS: dict[str, Question] = {
    "21/gpu": Question(
        answer=3,
        why="process 11 is the fourth one of node 2: LOCAL_RANK is 3, and this machine has the GPUs 0 to 3.",
        hint="GPUs are numbered on each machine from 0. Which variable starts again at 0 on each node?",
        traps={
            11: "That is RANK. A node with 4 GPUs has no GPU 11.",
            2: "That is the number of the node, GROUP_RANK.",
            4: "GPUs and ranks are counted from 0.",
        },
        choices=(2, 3, 4, 11),
    ),
    "21/load": Question(
        answer="rank 0 goes on with other weights than the rest",
        why="DDP sends the weights of rank 0 to all ranks only once, when it is created. Afterwards it averages "
        "gradients: different weights stay different. Load before DDP(network), on every rank.",
        hint="What does DDP send in a step: weights or gradients?",
        traps={
            "all ranks get the loaded weights": "DDP sends weights when it is created, and not in a step.",
            "DDP raises an error": "It does not compare the weights.",
        },
        choices=(
            "all ranks get the loaded weights",
            "rank 0 goes on with other weights than the rest",
            "DDP raises an error",
        ),
    ),
    "21/same": Question(
        answer="not at all",
        why="the same processes make the same calls with the same seeds. The notebook only starts them in another way.",
        hint="Which line of the cell computes something else than the script?",
        traps={
            "by rounding errors": "Each sum has the same terms in the same order.",
            "clearly: another start": "Both set the seed before the data and before the weights.",
        },
        choices=("not at all", "by rounding errors", "clearly: another start"),
    ),
    "21/environment": Question(
        answer={"RANK": 1, "LOCAL_RANK": 0},
        why="RANK counts over all nodes, LOCAL_RANK begins again on each node.",
        hint="One process per node: which numbers can a process have on its own node?",
        choices=(0, 1),
    ),
    "21/plain": Question(
        answer="an error about a missing variable",
        why="without torchrun, nothing has set LOCAL_RANK.",
        hint="The script reads its place from the environment. Who writes it there?",
        traps={
            "one process trains": "This is a common wish: os.environ.get with defaults makes it possible.",
            "it waits for other processes": "It does not get so far: it does not know how many there are.",
        },
        choices=("one process trains", "an error about a missing variable", "it waits for other processes"),
    ),
    "21/slurm": Question(
        answer={"started by Slurm": 2, "that train": 16},
        why="one task per node is one torchrun per node, and each torchrun starts 8 processes.",
        hint="--ntasks-per-node counts what srun starts, --nproc-per-node what torchrun starts.",
        choices=(1, 2, 8, 16),
    ),
    "21/rank-zero": Question(
        answer={
            'print("loss", loss.item())': "yes",
            "torch.save(network.state_dict(), path)": "yes",
            "dist.barrier()": "no",
            "dist.all_reduce(loss)": "no",
        },
        why="a line that needs other ranks must run on all of them.",
        hint="Which of these lines wait for other ranks?",
        choices=("yes", "no"),
    ),
    "21/batch": Question(
        answer=512,
        why="each of the 16 processes takes 32 images.",
        hint="The batch size of a DataLoader is that of one process.",
        traps={
            32: "That is the share of one process.",
            64: "There are 2 nodes, but 16 processes.",
            256: "That is one node.",
        },
        choices=(32, 64, 256, 512),
    ),
}

_STEPS, _BYTES = 4, 72  # steps of the epoch, and bytes of the gradients

PUZZLES: dict[str, Puzzle] = {
    "21/log": Puzzle(
        setup="""
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64 * world_size, 8), torch.randint(0, 2, (64 * world_size,)))
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
model = DDP(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = {name: value.clone() for name, value in model.state_dict().items()}
losses, all_losses = [], [None] * world_size
for x, y in loader:
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
dist.all_gather_object(all_losses, losses)
model.load_state_dict(start)
""",
        call="solution(model, optimizer, loader)",
        got="float(result)",
        wanted="sum(map(sum, all_losses)) / sum(map(len, all_losses))",
        targets=(
            Target(measure=COLLECTIVES, most=_STEPS + 1),
            Target(measure=SENT, most=lambda size: 2 * (size - 1) / size * (_STEPS * _BYTES + 8)),
        ),
        why="each rank adds up its own losses, and one call at the end of the epoch adds up the ranks.",
        hint="Add up the losses on each rank, and communicate once. DDP makes one call in each of the four steps.",
        wrong_hint="Return the mean loss over all ranks and steps, on every rank.",
    ),
}
