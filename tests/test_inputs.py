"""Tensors that gloo would compute wrongly are refused on all ranks before data moves."""

from __future__ import annotations

import pytest

from ddp_notebook.errors import RankError

USABLE = "x = torch.ones(1); dist.all_reduce(x); int(x)"
SENT_NOTHING = "Nothing was sent, and the group can be used"
REFUSED = {
    "a column": (
        "losses = torch.full((4, 2), rank + 1.0); dist.all_reduce(losses[:, 0])",
        "ValueError: all_reduce would change memory next to the tensor (shape [4], stride [2]): pass "
        f"x.contiguous() and copy the result back. {SENT_NOTHING} (ranks 0-1)",
    ),
    "a column on one rank": (
        "losses = torch.full((4, 2), 1.0); dist.all_reduce(losses[:, 0] if rank else torch.ones(4))",
        "ValueError: on rank 1, all_reduce would change memory next to the tensor (shape [4], stride [2]): pass "
        f"x.contiguous() and copy the result back. {SENT_NOTHING} (ranks 0-1)",
    ),
    "an expanded tensor": (
        "dist.broadcast(torch.ones(1, 3).expand(4, 3), 0)",
        "broadcast would change memory next to the tensor (shape [4, 3], stride [0, 1])",
    ),
    "another operation on a rank with a right tensor": (
        "dist.all_reduce(torch.ones(4, 2)[:, 0]) if rank else dist.barrier()",
        "on rank 1, all_reduce would change memory next to the tensor",
    ),
    "transposed on one rank": (
        "x = torch.ones(3, 4); dist.all_reduce(x.T.contiguous() if rank else x.T)",
        "rank 0 calls all_reduce(SUM, float32[4,3], memory order [1, 0]); rank 1 calls all_reduce(SUM, float32[4,3]). "
        f"{SENT_NOTHING}; pass x.contiguous() on all ranks",
    ),
    "a transposed input, and a contiguous output": (
        "dist.reduce_scatter(torch.ones(4, 3), [torch.ones(3, 4).T] * 2)",
        "reduce_scatter would mix up the elements of tensors in different memory orders (shape [4, 3], stride [3, 1] "
        "and shape [4, 3], stride [1, 4]): pass x.contiguous()",
    ),
    "a strided input of the root": (
        "dist.scatter(torch.ones(4), [torch.ones(4, 2)[:, 0]] * 2 if rank == 0 else None, 0)",
        "on rank 0, scatter would read memory next to the tensor (shape [4], stride [2]): pass x.contiguous()",
    ),
    "an output that overlaps itself": (
        "dist.all_gather_into_tensor(torch.ones(4).expand(2, 4), torch.ones(1, 4))",
        "all_gather_single would write several elements to one address (shape [2, 4], stride [0, 1]): pass a",
    ),
    "overlapping tensors in a list": (
        "x = torch.ones(6); dist.all_gather([x[:4], x[2:]], torch.ones(4))",
        "all_gather needs a separate tensor for each result, but some of the 2 tensors share memory",
    ),
    "an output in the memory of the input": (
        "x = torch.ones(4); dist.all_to_all_single(x, x)",
        "all_to_all_single would overwrite input that is not sent yet, because the output shares its memory: pass "
        f"torch.empty_like(x) as the output. {SENT_NOTHING}",
    ),
    "one tensor for a send and a receive": (
        "x = torch.ones(4); other = 1 - rank\n"
        "dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, x, other)])",
        "ValueError: batch_isend_irecv would receive into memory of another tensor in the batch: pass a separate "
        "tensor to each irecv (ranks 0-1)",
    ),
    "a call of torch.distributed.nn.functional": (
        "from torch.distributed.nn import functional\n"
        "x = torch.ones(3, 4); functional.broadcast(x.T.contiguous() if rank else x.T, 0)",
        "rank 0 calls broadcast(float32[4,3], memory order [1, 0], root 0); rank 1 calls broadcast(",
    ),
    "a transposed output with a contiguous input": (
        "dist.all_to_all_single(torch.ones(3, 2).T, torch.ones(2, 3))",
        "all_to_all_single would mix up the elements of tensors in different memory orders",
    ),
    "a lazy negation": (
        "z = torch.ones(4, dtype=torch.complex64); dist.reduce(z.conj().imag, 0)",
        "reduce would not change the tensor, a lazy negation: pass x.clone() and copy the result back",
    ),
    "a lazy conjugate": (
        "z = torch.ones(4, dtype=torch.complex64); dist.reduce_scatter_tensor(z.conj(), torch.ones(8).to(z.dtype))",
        "reduce_scatter_single would not change the tensor, a lazy conjugate: pass x.clone() and copy the result back",
    ),
    "a meta tensor on one rank": (
        "dist.all_reduce(torch.ones(4, device='meta' if rank else 'cpu'))",
        "rank 1 calls all_reduce(SUM, float32[4], meta device)",
    ),
    "a sparse tensor on one rank": (
        "x = torch.ones(4); dist.all_reduce(x.to_sparse() if rank else x)",
        "rank 1 calls all_reduce(SUM, float32[4], sparse_coo)",
    ),
    "a sparse input of an operation for dense tensors": (
        "dist.all_to_all_single(torch.ones(2, 2), torch.ones(2, 2).to_sparse_csr())",
        "all_to_all_single would mix sparse and dense tensors: pass x.to_dense()",
    ),
}


@pytest.mark.parametrize(("code", "words"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_tensor_is_refused_on_all_ranks(session, code, words):
    epoch = session.ranks.epoch
    with pytest.raises(RankError) as caught:
        session.run(code, timeout_s=20)
    assert words in str(caught.value)
    assert set(caught.value.summaries) == {0, 1}
    assert session.ranks.epoch == epoch
    assert session.run(USABLE, timeout_s=20)[1].result == "2"


def test_sparse_outputs_get_the_error_of_torch(session):
    with pytest.raises(RankError, match="invalid tensor type at index 0"):
        session.run("dist.all_gather([torch.ones(2).to_sparse() for _ in range(2)], torch.ones(2))", timeout_s=20)
    assert session.run(USABLE, timeout_s=20)[1].result == "2"


def test_memory_next_to_a_refused_tensor_is_unchanged(session):
    session.run(
        "losses = torch.full((4, 2), rank + 1.0)\n"
        "for call in (dist.all_reduce, lambda x: dist.broadcast(x, 0), lambda x: dist.reduce(x, 0)):\n"
        "    try: call(losses[:, 0])\n"
        "    except ValueError: pass\n"
    )
    result = session.run("losses.unique().tolist()")
    assert [result[rank].result for rank in (0, 1)] == ["[1.0]", "[2.0]"]


LEGAL = {
    "the fix of the message": (
        "losses = torch.full((4, 2), rank + 1.0); x = losses[:, 0].contiguous(); dist.all_reduce(x); losses[:, 0] = x\n"
        "assert losses.tolist() == [[3, rank + 1]] * 4"
    ),
    "transposed on all ranks": "x = torch.ones(3, 4).T; dist.all_reduce(x); assert (x == 2).all()",
    "channels_last on all ranks": (
        "x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last); dist.broadcast(x, 0)"
    ),
    "transposed inputs and outputs": (
        "a, b = torch.ones(3, 4).T, torch.zeros(3, 4).T; dist.reduce_scatter(b, [a, a]); assert (b == 2).all()"
    ),
    "columns as outputs": (
        "x = torch.zeros(4, 2); dist.all_gather(list(x.unbind(1)), torch.full((4,), rank + 1.0))\n"
        "assert x.tolist() == [[1, 2]] * 4"
    ),
    "an input in its place of the output": (
        "x = torch.zeros(4); x[2 * rank:][:2] = rank + 1; dist.all_gather_into_tensor(x, x[2 * rank:][:2])\n"
        "assert x.tolist() == [1, 1, 2, 2]"
    ),
    "one tensor sent twice in a batch": (
        "x, y = torch.ones(4), torch.zeros(2, 4); other = 1 - rank\n"
        "ops = [dist.P2POp(dist.isend, x, other, tag=t) for t in (0, 1)]\n"
        "ops += [dist.P2POp(dist.irecv, y[t], other, tag=t) for t in (0, 1)]\n"
        "for work in dist.batch_isend_irecv(ops): work.wait()\n"
        "assert (y == 1).all()"
    ),
    "a lazy negation whose result is not needed": (
        "z = torch.full((4,), rank - 1j)\nx = z.conj().imag.clone() if rank == 0 else torch._neg_view(-torch.ones(4))\n"
        "dist.reduce(x, 0)\nif rank == 0: assert (x == 2).all(), x"
    ),
    "one input twice": "x = torch.zeros(2); dist.reduce_scatter(x, [torch.ones(2)] * 2); assert x.tolist() == [2, 2]",
    "an expanded input": "x = torch.zeros(4); dist.all_gather_into_tensor(x, torch.ones(1).expand(2))",
    "dimensions of one element": "dist.all_reduce(torch.ones(4, 2)[:1, :1]); dist.all_reduce(torch.ones(2, 1).T)",
    "no elements": "dist.all_reduce(torch.ones(4, 0).T); dist.all_gather([torch.zeros(0)] * 2, torch.zeros(0))",
    "a sparse tensor": "x = torch.ones(4).to_sparse(); dist.all_reduce(x); assert (x.to_dense() == 2).all()",
    "meta tensors": "dist.all_reduce(torch.ones(4, device='meta'))",
}


@pytest.mark.parametrize("code", LEGAL.values(), ids=LEGAL)
def test_a_right_tensor_is_not_refused(session, code):
    assert session.run(code, timeout_s=20).ok
    assert session.run(USABLE, timeout_s=20)[1].result == "2"


def test_an_asynchronous_call_is_refused_before_data_moves(session):
    code = "losses = torch.full((4, 2), rank + 1.0); work = dist.all_reduce(losses[:, 0], async_op=True); work.wait()"
    with pytest.raises(
        RankError, match=r"ValueError: all_reduce would change memory .* back. This rank has sent nothing \(ranks 0-1\)"
    ):
        session.run(code, timeout_s=20)
    assert session.run("losses.unique().tolist() == [rank + 1]", timeout_s=20)[0].result == "True"
    assert session.run(USABLE, timeout_s=20)[1].result == "2"


def test_a_rank_that_is_asynchronous_alone_raises(session):
    code = "x = torch.ones(4, 2); work = dist.all_reduce(x[:, 0] if rank else torch.ones(4), async_op=bool(rank))"
    with pytest.raises(RankError, match=r"all_reduce would change memory .* This rank has sent nothing \(rank 1\)"):
        session.run(code, timeout_s=20)
    assert session.run(USABLE, timeout_s=20)[1].result == "2"


def test_a_message_without_data_is_refused(session):
    code = "x = torch.ones(4, device='meta'); dist.send(x, 1) if rank == 0 else dist.recv(torch.ones(4), 0)"
    with pytest.raises(RankError, match="send needs a tensor with data, got one on the meta device"):
        session.run(code, timeout_s=20)
    assert session.run(USABLE, timeout_s=20)[1].result == "2"


def test_calls_of_ddp_are_not_checked(session):
    """Their tensors are right by construction."""
    session.run(
        "from ddp_notebook.rank.group.guard import guard\n"
        "seen, check = [], guard.check\n"
        "guard.check = lambda call, rank: (seen.append(call.kernel.spec.name), check(call, rank))[1]\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for _ in range(3): model(torch.ones(2, 4)).sum().backward()\n"
        "before = list(seen); dist.all_reduce(torch.ones(2)); guard.check = check",
        timeout_s=20,
    )
    assert session.run("before, seen[len(before):]")[0].result == "([], ['all_reduce'])"
