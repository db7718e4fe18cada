"""Questions of the notebooks by name: the number of the notebook and a word. To add a question, add an entry."""

from __future__ import annotations

import math

from ddp_notebook.lessons.questions.judging import Question


def _shape(size: int) -> tuple[int, int]:
    """Return rows and columns of the mesh that the notebook creates from the ranks."""
    rows = 2 if size >= 4 and size % 2 == 0 else 1
    return rows, size // rows


_MILLIONS = 2.102272  # parameters of the network


def _order(size: int) -> list[str]:
    """Return the actions of rank 0 in 1F1B with `size` stages and twice as many microbatches."""
    turns = [one for k in range(size) for one in (f"B{k}", f"F{size + k}")]
    return [*(f"F{k}" for k in range(size)), *turns, *(f"B{k}" for k in range(size, 2 * size))]


def _product(size: int) -> int:
    product = 1
    for number in range(1, size + 1):
        product *= number
    return product


def _bits(size: int, rule: str) -> int:
    total = 1
    for number in range(2, size + 1):
        total = {"and": total & number, "or": total | number, "xor": total ^ number}[rule]
    return total


QUESTIONS: dict[str, Question] = {
    # ---- 04: processes, ranks, nodes, groups
    "04/boxes": Question(
        answer=lambda size: {rank: 1 for rank in range(size)},
        why="each process has its own list, and has put one number into it.",
        hint="Ask yourself whether two processes can put something into the same Python list.",
        traps=lambda size: {size: f"{size} would be the length of one list that all ranks share."},
    ),
    "04/world-size": Question(
        answer=24,
        why="3 nodes with 8 processes each are 24 processes.",
        hint="Every process counts, on all nodes.",
        traps={3: "3 is the number of nodes.", 8: "8 is the number of processes of one node."},
    ),
    "04/where-is-13": Question(
        answer=(1, 5),
        why="13 = 1 * 8 + 5: node 1, local rank 5, and so GPU 5 of that machine.",
        hint="Nodes and local ranks are counted from 0, and each node has 8 processes: 13 divided by 8, with rest.",
        traps={
            (2, 5): "Nodes are counted from 0 too.",
            (1, 13): "A local rank starts again at 0 on every node; this machine has no GPU 13.",
        },
    ),
    "04/backend": Question(
        answer={
            "GPU tensors, a process per GPU": "nccl",
            "tensors in main memory": "gloo",
            "two ranks on one GPU": "gloo",
        },
        why="NCCL for tensors on GPUs with a GPU for each rank, gloo for the rest.",
        hint="NCCL moves only tensors on GPUs, and wants a GPU for each rank.",
    ),
    "04/evens-and-odds": Question(
        answer=lambda size: {rank: float(sum(r + 1 for r in range(rank % 2, size, 2))) for rank in range(size)},
        why="each rank gets the sum over its own group only.",
        hint="Rank r brings r + 1, and only ranks of the same group are added up: the even ones, or the odd ones.",
    ),
    "04/neighbours": Question(
        answer=lambda size: {r: sum(m for m in (r // 2 * 2, r // 2 * 2 + 1) if m < size) for r in range(size)},
        why="0 and 1 make a group, 2 and 3 the next one, and each adds up its own ranks.",
        hint="Rank r belongs to the group that begins at r // 2 * 2. Every rank has to call new_group for every group.",
    ),
    # ---- 05: point to point
    "05/who-waits": Question(
        answer="sender",
        why="send of gloo returns when the receiver has taken the data, so rank 0 waited for rank 1.",
        hint="Look at the seconds: one of the two had nothing to do until the other came.",
        traps={"receiver": "The receiver started last, so it did not have to wait."},
    ),
    "05/changed": Question(
        answer=[100.0, 100.0],
        why="rank 1 received after rank 0 had changed the data, so it got the changed buffer.",
        hint="isend only notes where the data are. They are read when rank 1 is ready, and rank 0 had gone on by then.",
        traps={(0.0, 0.0): "That is what rank 0 wanted to send."},
    ),
    "05/first-comer": Question(
        answer=lambda size: size - 1,
        why="the last rank sleeps for the shortest time, so its message comes first.",
        hint="Rank 0 takes the first message. Which rank sleeps for the shortest time?",
    ),
    "05/tags": Question(
        answer=["second", "first"],
        why="the tag chooses the message, and not the order in which they were sent.",
        hint="recv takes the message whose tag it names, and the others wait.",
    ),
    "05/shift": Question(
        answer=lambda size: {rank: float((rank - 1) % size) for rank in range(size)},
        why="each rank has the number of its left neighbour, and rank 0 that of the last.",
        hint="Rank r sends to (r + 1) % world_size and receives from (r - 1) % world_size. Start both before you wait.",
    ),
    # ---- 06: collectives
    "06/all-reduce": Question(
        answer=lambda size: {r: [sum(range(1, size + 1)), 10.0 * sum(range(1, size + 1))] for r in range(size)},
        why="the sums, the same on every rank.",
        hint="Add up the first numbers of all ranks, and then the second ones; every rank gets both sums.",
    ),
    "06/reduce-op": Question(
        answer=lambda size: {
            "SUM": size * (size + 1) // 2,
            "PRODUCT": _product(size),
            "MIN": 1,
            "MAX": size,
            "BAND": _bits(size, "and"),
            "BOR": _bits(size, "or"),
            "BXOR": _bits(size, "xor"),
        },
        why="one number from all, by seven rules.",
        hint="For the last three write 1, 2, 3, ... as binary numbers and go through them column by column.",
    ),
    "06/which": Question(
        answer={
            "average the gradients": "all_reduce",
            "all ranks need the vectors of all ranks": "all_gather",
            "start from the weights of rank 0": "broadcast",
            "each rank keeps its share of the sum": "reduce_scatter",
            "each rank has tokens for each other rank": "all_to_all",
        },
        why="distributed training mostly uses these five collectives.",
        hint="Which ranks have the data before, and which ranks need which data afterwards?",
    ),
    "06/mean": Question(
        answer=lambda size: {rank: (size * size - 1) / 2 for rank in range(size)},
        why="the sum of all numbers, divided by their count.",
        hint="The ranks have different amounts of numbers, so a mean of their means counts some more than others. Add "
        "up sums and counts, and divide at the end.",
    ),
    # ---- 07: ring, tree, parameter server
    "07/server-bytes": Question(
        answer=lambda size: 2 * (size - 1) * 48,
        why="48 bytes come in from every other rank, and 48 bytes go out to every other rank.",
        hint="Count both directions: the server receives from each other rank, and sends to it.",
    ),
    "07/ring-bytes": Question(
        answer=700,
        why="2 * 7 / 8 * 400 MB. A hundred ranks would send hardly more: 792 MB each.",
        hint="A rank sends 2 (N - 1) chunks, and a chunk is the N-th part of the data.",
        traps={
            2800: "Those are the bytes of sending the whole tensor around, N - 1 times.",
            350: "That is the first half: the sums are complete, but each rank has only one chunk of them.",
        },
    ),
    "07/server-load": Question(
        answer=5600,
        why="7 * 400 MB in and 7 * 400 MB out, all through one link; it grows with every rank.",
        hint="The server gets 400 MB from each of the 7 others, and sends 400 MB to each of them.",
        traps={2800: "That is one direction."},
    ),
    "07/steps": Question(
        answer={"ring": 14, "tree": 6},
        why="2 (N - 1) against 2 log2 N: the tree is faster for small tensors; for large ones the bytes count.",
        hint="The ring goes round twice, less one step each time. The tree halves, then doubles: log2(8) steps each.",
    ),
    "07/which": Question(
        answer={"a tensor of 4 bytes": "latency", "a tensor of 400 MB": "bandwidth"},
        why="alpha counts for small tensors, beta for large ones.",
        hint="T = messages * alpha + bytes * beta: which of the two terms is the larger one?",
    ),
    # ---- 08: distributed SGD by hand
    "08/lost": Question(
        answer=2,
        why="1257 + 359 + 179 is 1795: int() cuts off 0.9, 0.4 and 0.7 of an image, and no rank gets the last two.",
        hint="Work out 0.7, 0.2 and 0.1 of 1797, cut each down to a whole number, and add them up.",
        traps={0: "The shares add up to 1, but the whole numbers do not add up to 1797.", 1: "Add up the three."},
    ),
    "08/equal": Question(
        answer={
            "average gradients": True,
            "average parameters after each step": True,
            "average parameters before each step": False,
            "average parameters after each step, Adam": False,
        },
        why="an update that is linear in the gradient can be averaged before or after. Adam is not linear. With a "
        "mean before the step, each rank still makes its own step.",
        hint="Write one step as w - lr * g, and ask whether the mean over the ranks may be taken inside or outside.",
    ),
    "08/dealt": Question(
        answer=lambda size: math.ceil(1258 / size) * size,
        why="every rank gets the same number, so some images are used twice if the division has a remainder.",
        hint="All ranks get the same number, and no image is left out: round 1258 up to a multiple of the world size.",
        traps=lambda size: {1258 // size * size: "That is the number with drop_last=True."} if 1258 % size else {},
    ),
    "08/uneven": Question(
        answer=True,
        why="each rank's mean counts by its number of images, and so the sum is the mean over all of them.",
        hint="Multiply the gradient by this rank's number of images, add up gradients and numbers over the ranks, and "
        "divide one by the other.",
    ),
    # ---- 09: DDP from the inside, and DataParallel
    "09/first-bucket": Question(
        answer="last",
        why="backward begins at the last layer, so its gradients are ready first, and their bucket is sent first.",
        hint="Which layer's gradients does autograd compute first?",
        traps={"first": "The backward reaches the first layer last."},
    ),
    "09/slow-link": Question(
        answer="fp16",
        why="on a slow link the time depends on the bytes: half the bytes take half the time, with any bucket size.",
        hint="Small buckets hide communication behind the backward, but only as long as the backward lasts.",
        traps={
            "small buckets": "They hide only as much as the backward takes, which is short compared to the transfer."
        },
    ),
    "09/default-device": Question(
        answer={
            "parameters": False,
            "gradients": False,
            "optimizer state": True,
            "activations": False,
            "whole batch": True,
            "gathered outputs": True,
        },
        why="the update is made there, the loss too, and the batch begins there.",
        hint="Follow one step: where does the batch begin, where do the outputs come together, who makes the update?",
    ),
    "09/accumulate": Question(
        answer=1,
        why="three passes only added to the gradients of their rank, and the fourth sent the sum.",
        hint="Put forward and backward of the first three passes under `with model.no_sync():`.",
        traps={
            4: "Every pass synchronises still.",
            "another gradient": "It sends once, but the gradient is not the mean over all four.",
            0: "The last pass has to synchronise, or every rank steps with its own gradient.",
        },
    ),
    # ---- 10: calls to other ranks, and references
    "10/runs-on": Question(
        answer=1,
        why="worker1 runs it, with its own variables.",
        hint="Only the name of the function and its arguments travel. Whose variables does it see?",
        traps={0: "Rank 0 has made the call; it does not run the function."},
    ),
    "10/naps": Question(
        answer=0.2,
        why="each call has its own thread at the callee, so all five sleep at the same time.",
        hint="rpc_async returns immediately, so the second call is made while the first one sleeps.",
        traps={1.0: "That would be rpc_sync, with one call after the other."},
        tolerance=0.5,
    ),
    "10/agent-calls": Question(
        answer=lambda size: 12 * (size - 1),
        why="each of the six steps has a select_action and a report, and all but rank 0 observe.",
        hint="Count the calls in Observer.play: how many in a step, how many steps, how many observers?",
        traps=lambda size: {6 * (size - 1): "The rewards are reported by calls, too."},
    ),
    "10/sum-by-calls": Question(
        answer=lambda size: {rank: size * (size + 1) // 2 for rank in range(size)},
        why="each call brought one number, and the last call completed all futures.",
        hint="worker0 keeps each number with its future, and fills all futures when world_size of them are there. "
        "Every rank calls init_rpc, the function on worker0, and shutdown; async_execution lets it return a future.",
    ),
    # ---- 11: distributed autograd, and parameter servers
    "11/gradients": Question(
        answer="in the context",
        why="several backwards may use the same weights at the same time, each in its own context.",
        hint="Ask what would be in .grad if two trainers went through one server at the same time.",
    ),
    "11/forgotten": Question(
        answer="nothing",
        why="without a context the tensors travel as numbers only, and the backward ends where they came in.",
        hint="How would worker1 learn of the backward?",
        traps={"ones": "That would be right within a context."},
    ),
    "11/staleness": Question(
        answer=lambda size: 2 * (size - 1) - 1,
        why="while one trainer computes, each of the others pushes once.",
        hint="Between the fetch and the push of one trainer: how many times does each of the others push?",
        traps={0: "That is right if all trainers wait for each other."},
    ),
    "11/which": Question(
        answer={
            "every rank has the whole model and its share of the images": "DDP",
            "games run on other machines, and ask one policy": "RPC",
            "a table for all users in one place, dense layers everywhere": "both",
            "a server whose trainers must not wait for each other": "RPC",
        },
        why="collectives where all do the same at the same time, calls where they do not.",
        hint="Ask whether all ranks are in the same line at the same time.",
    ),
    "11/bounded": Question(
        answer=[True, True, False, True, True],
        why="the third gradient was two updates old; a rejected gradient does not increase the version.",
        hint="Compare version with self.version, take the step and count it under the lock, or else return False.",
        traps={(True, True, True, True, True): "The third gradient is two updates old."},
    ),
    "12/one-batch": Question(
        answer=lambda size: (size - 1) / size,
        why="one rank computes at a time, and all the others wait.",
        hint="At each moment one of the ranks computes. What share of them does not?",
        traps=lambda size: {1 / size: "That is the share of the time in which a rank computes."} if size > 2 else {},
        tolerance=0.02,
    ),
    "12/bubble": Question(
        answer=lambda size: (size - 1) / (3 * size - 1),
        why="with p stages and m microbatches it is (p - 1) / (m + p - 1).",
        hint="A rank is busy for 2 n units. The last stage has to wait for n - 1 of them until its first microbatch "
        "has come, and the first stage for as many at the end.",
        traps=lambda size: {
            (size - 1) / (2 * size): "That is lost time over compute time; the bubble is a share of the total time.",
            (size - 1) / size: "That was the bubble of a single microbatch.",
        },
        tolerance=0.12,
    ),
    "12/schedule": Question(
        answer="neither",
        why="both fill and drain the pipeline in the same time; 1F1B keeps fewer activations.",
        hint="Compare the two lines of the table: which numbers differ by more than noise?",
        traps={"1F1B": "Many tutorials say so.", "GPipe": "Look at the numbers without messages."},
    ),
    "12/order": Question(
        answer=_order,
        why="fill with n forwards, then a backward and a forward in turns, and drain with n backwards.",
        hint="Rank 0 begins n forwards before the first gradient is back. Then it does one backward and one forward in "
        "turns until all forwards are done.",
    ),
    "13/ddp": Question(
        answer=16 * _MILLIONS,
        why="4 bytes for the parameter, 4 for its gradient, 8 for Adam, and every rank has all of them.",
        hint="Four numbers of 4 bytes each, for every parameter.",
        traps={
            4 * _MILLIONS: "Those are the parameters alone.",
            8 * _MILLIONS: "Adam keeps two numbers for each parameter as well.",
            12 * _MILLIONS: "Adam keeps two numbers for each parameter, not one.",
        },
        tolerance=0.03,
    ),
    "13/sharded": Question(
        answer=lambda size: {"ZeRO-1": (8 + 8 / size) * _MILLIONS, "FSDP": 16 / size * _MILLIONS},
        why="ZeRO-1 divides the 8 bytes of Adam, FSDP all 16.",
        hint="Which of the 16 bytes are divided by the number of ranks?",
        tolerance=0.03,
    ),
    "13/gathers": Question(
        answer={"reshard": 8, "no reshard": 4},
        why="each block is gathered for the forward, and once more for the backward unless it has stayed.",
        hint="Count the blocks, and whether the backward finds their parameters still there.",
    ),
    "13/first": Question(
        answer=False,
        why="the optimizer steps parameters that are in no model any more.",
        hint="Whose parameters did the optimizer get, and who computes the loss now?",
    ),
    "13/bytes": Question(
        answer={"DDP": 16e9, "ZeRO-1": 9e9, "FSDP": 2e9},
        why="16 bytes for each parameter, of which ZeRO-1 divides 8 and FSDP all.",
        hint="In DDP it does not depend on the number of ranks.",
    ),
    # ---- 14: DTensor and tensor parallelism
    "14/shape": Question(
        answer=lambda size: (6, math.ceil(12 / size)),
        why="dimension 1 are the columns: they are dealt out, and every rank has all rows.",
        hint="Which of the two numbers is that of dimension 1? Divide it by the number of ranks.",
        traps=lambda size: {(math.ceil(6 / size), 12): "That is Shard(0): dimension 0 are the rows."},
    ),
    "14/collectives": Question(
        answer={
            "A whole, B by columns": "all_gather",
            "A by rows, B whole": "all_gather",
            "A by columns, B by rows": "all_reduce",
        },
        why="finished elements are gathered, summands are added up.",
        hint="Has a rank the whole row and the whole column of an element? Then the element is finished, and others "
        "only lack it.",
    ),
    "14/sums": Question(
        answer=1,
        why="between the two matrices every rank continues with its own numbers; only the final outputs are summands.",
        hint="After `up` every rank has complete numbers, and `down` takes just these. What does it have after that?",
        traps={
            2: "The output of `up` need not be gathered: `down` takes the sharded output directly.",
            0: "Its rows are cut.",
        },
    ),
    "14/factor": Question(
        answer="none",
        why="each rank has another summand of every element, and no number makes the sum of one of them.",
        hint="Are the summands of the ranks equal?",
    ),
    "14/words": Question(
        answer=lambda size: 24 * size,
        why="all words of all ranks go there, and the other experts have nothing to do.",
        hint="Every rank sends all of its words to rank 0.",
        traps=lambda size: {24: "Those are its own; the other ranks send theirs too."} if size > 1 else {},
    ),
    "14/passes": Question(
        answer=lambda size: size - 1,
        why="it begins at one rank, and each pass takes it to one more.",
        hint="At how many ranks is it at the beginning, and how many more are there?",
        traps=lambda size: {size: "The last pass would bring it back to its first rank."},
    ),
    "14/row-parallel": Question(
        answer=True,
        why="the pieces' products are summands, and an all-reduce adds them up.",
        hint="Multiply the pieces, and ask what is still missing to every element.",
    ),
    # ---- 15: meshes
    "15/row": Question(
        answer=lambda size: list(range(_shape(size)[1])),
        why="the first row is filled before the second one begins.",
        hint="Place the ranks row by row, and look at the position of rank 1.",
        traps={(1, 3): "That is its column: the ranks below it, not in its row."},
    ),
    "15/ways": Question(
        answer={"gather": "row", "scatter": "row", "average": "column"},
        why="a row holds the whole model once, so a layer is put together there; the copies are the other rows.",
        hint="Where are the parts of one copy of the model? Along that they are gathered and scattered. The other way "
        "lie the copies.",
    ),
    "15/share": Question(
        answer=lambda size: 1 / size,
        why="the row divides the matrix, and the column divides each piece: all ranks together hold it once.",
        hint="Divide by the number of ranks in a row, and that once more by the number of ranks in a column.",
        traps=lambda size: (
            {1 / _shape(size)[1]: "That is a piece; FSDP has sharded it once more."} if _shape(size)[0] > 1 else {}
        ),
        tolerance=0.05,  # if the sizes are not divisible
    ),
    "15/complaint": Question(
        answer=False,
        why="all shapes fit, and nothing in torch compares the inputs of the ranks that share a matrix.",
        hint="What could notice it? Every message has the right size.",
    ),
    "15/shape": Question(
        answer=(2, 4),
        why="two rows, a machine each, and the four GPUs of a machine in a row.",
        hint="The ranks of one machine have consecutive numbers, and so do the ranks of a row.",
        traps={(4, 2): "Then a row has two GPUs, and half of the columns lead to the other machine."},
    ),
    "15/coordinates": Question(
        answer=lambda size: {rank: divmod(rank, _shape(size)[1]) for rank in range(size)},
        why="the row is the number of whole rows before the rank, the column is the remainder.",
        hint="Divide the rank by the number of columns: one of the two is the quotient, the other is the remainder.",
    ),
    # ---- 16: the training loop
    "16/who-skips": Question(
        answer="all",
        why="the mean of gradients of which one is infinite is infinite, so every rank finds it in its own copy.",
        hint="Which gradients does every rank have after the backward of DDP?",
        traps={"rank 1": "That would be right if each rank checked the gradients of its own batch only."},
    ),
    "16/messages": Question(
        answer={"nothing": 4, "backward": 4, "forward and backward": 1},
        why="DDP decides in the forward whether the next backward sends, so the forward has to be inside too.",
        hint="When does DDP decide whether a backward is one that sends?",
    ),
    "16/times": Question(
        answer=8,
        why="there are as many weights as gradients, and they are sent once in 8 steps.",
        hint="Compare the size of all weights with the size of all gradients. How often are they sent?",
        traps={4: "That is how often they meet.", 32: "DDP sends 32 times; how often does local SGD?"},
    ),
    "16/careful": Question(
        answer=lambda size: {
            rank: {"skipped": [3], "is finite": True, "is clipped": True, "has moved": True} for rank in range(size)
        },
        why="average first, so that all ranks find the infinity; unscale, so that the norm is right; then clip.",
        hint="Three calls, in this order: the mean over the ranks, unscale_, clip_grad_norm_. Clipping before "
        "unscale_ clips the scaled gradients, and the step is far too small.",
    ),
    # ---- 17: checkpoints
    "17/share": Question(
        answer=lambda size: 1 / size,
        why="state_dict() gives each rank its own part of every parameter, and only rank 0 has saved its part.",
        hint="Where are the other parts when rank 0 writes, and has rank 0 gathered them?",
        traps={1: "No rank has gathered it: rank 0 has only its own part.", 0: "Its own part is in the file."},
    ),
    "17/next-step": Question(
        answer=30,
        why="the part of the dead rank is in the checkpoint of step 30 only, and the others must not be ahead of it.",
        hint="Where is the dead rank's part of the model, and of which step?",
        traps={
            45: "The others have their parts of step 45, but the part of rank 1 is lost.",
            20: "A newer checkpoint exists.",
        },
    ),
    "17/to-the-bit": Question(
        answer={"next step": True, "the one after": True},
        why="the next steps depend only on the parameters, Adam's state and the state of the random number generator.",
        hint="Which objects does a step change? Save the state of each: model, optimizer, generator of batches.",
    ),
    # ---- 18: a GPT
    "18/lower": Question(
        answer="theirs",
        why="each of their positions but the last can look at the character that it is to guess.",
        hint="Ask what a mask of 0.0 and 1.0 forbids when it is added to the scores.",
        traps={"ours": "A low loss does not prove a good model."},
    ),
    "18/worst": Question(
        answer=31,
        why="the last position has no later one to copy from, and has learnt nothing else.",
        hint="Which position cannot see the character that it is to guess?",
        traps={0: "That is right for a model that sees only the past: its first position has the least context."},
    ),
    "18/second-attempt": Question(
        answer=40,
        why="snapshots were saved after 20 and after 40 steps; later steps were only in the memory of the dead rank.",
        hint="What is in the file when the rank dies after 53 steps?",
        traps={
            53: "The processes with steps 40 to 52 in memory have died.",
            0: "The script starts from the saved state.",
        },
    ),
    "18/sees-future": Question(
        answer={"ours": False, "theirs": True, "one too far": True},
        why="another last character changes the output of an earlier position only if that position can see it.",
        hint="Call the model with two texts that differ in the last character, and compare all positions before it.",
    ),
    "19/next-step": Question(
        answer=50,
        why="the checkpoint was saved after 50 steps, 0 to 49; later steps were only in the memory of the dead rank.",
        hint="New processes have only the state in the file, which is written after every 50 steps.",
        traps={
            65: "That would be right if a process had kept steps 50 to 64.",
            0: "The script starts from the saved state.",
        },
    ),
    "19/who-restarts": Question(
        answer=2,
        why="a group with a dead member is of no use, so the agent ends the other worker too and starts both.",
        hint="Ask whether the healthy worker can continue with its group.",
        traps={1: "The other worker's group has a dead member, and it cannot get another one."},
    ),
    "19/joined": Question(
        answer=3,
        why="the new group is made of new processes only: the one that trained was ended and started again.",
        hint="A process group cannot grow, and an agent gives a running worker no new one.",
        traps={2: "The worker that trained had a group of one, and a group cannot grow."},
    ),
    "19/survive": Question(
        answer={"new processes": 1, "steps again": 0},
        why="the dead rank got a new process and its state from the other ranks, which stayed at their step.",
        hint="Which rank has died, and which ranks still have the state?",
    ),
    "19/images": Question(
        answer=lambda size: {rank: {"seen": 640} for rank in range(size)},
        why="80 steps of 8 images on each rank, no matter which rank died.",
        hint="Add 8 inside `with step:`, and pass the dictionary to survive(): it is restored before the step is "
        "repeated, and copied to the new process.",
    ),
    # ---- 20: is my training right?
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
