"""Questions of lesson 21: from notebook to script."""

from __future__ import annotations

from ddp_notebook.lessons.questions.judging import Question

QUESTIONS: dict[str, Question] = {
    "21/gpu": Question(
        answer=5,
        why="process 13 is the sixth one of node 1: LOCAL_RANK is 5, and this machine has the GPUs 0 to 7.",
        hint="GPUs are numbered on each machine from 0. Which variable starts again at 0 on each node?",
        traps={
            13: "That is RANK. A node with 8 GPUs has no GPU 13.",
            1: "That is the number of the node, GROUP_RANK.",
            6: "GPUs and ranks are counted from 0.",
        },
        choices=(1, 5, 6, 13),
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
        why="what needs other ranks must run on all of them.",
        hint="Which of these lines wait for other ranks?",
        choices=("yes", "no"),
    ),
    "21/batch": Question(
        answer=512,
        why="each of the 16 processes takes 32 images.",
        hint="The batch size of a DataLoader is that of one process.",
        traps={32: "That is the share of one process.", 64: "There are 2 nodes, but 16 processes.", 256: "That is one node."},
        choices=(32, 64, 256, 512),
    ),
}
