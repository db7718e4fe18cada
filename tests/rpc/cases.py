# ruff: noqa: E501
"""The cases of `observed.py`: code that rank 0 runs, by name. `to` is the other worker, `me` this one."""

import re

CASES = {}
_FUNCTIONS = {
    "good": ("good", "(1,)"),
    "bad": ("bad", "()"),
    "bad_class": ("bad_class", "()"),
    "exits": ("exits", "()"),
    "slow": ("slow", "()"),
    "lock": ("lock", "()"),
    "later": ("later", "(1,)"),
    "later_bad": ("later_bad", "()"),
    "later_lock": ("later_lock", "()"),
    "later_raises": ("later_raises", "()"),
    "later_then_raises": ("later_then_raises", "()"),
    "later_none": ("later_none", "()"),
    "later_tensor": ("later_tensor", "()"),
    "later_remote": ("later_remote", "(me, 1)"),
    "never": ("never", "()"),
    "nested": ("nested", "(me, 1)"),
    "static_later": ("Held.static_later", "(1,)"),
    "static_tensor": ("Held.static_tensor", "()"),
    "class_later": ("Held.class_later", "(1,)"),
    "class_none": ("Held.class_none", "()"),
    "builtin": ("torch.add", "(one, one)"),
    "builtin_bad": ("torch.add", "(one, two)"),
    "script": ("script", "(one, one)"),
    "script_bad": ("script", "(one, two)"),
    "script_raises": ("script_raises", "(one,)"),
    "script_later": ("script_later", "(me, one, one)"),
    "script_later_bad": ("script_later", "(me, one, two)"),
    "arguments": ("good", "()"),
    "operator": ("len", "([1, 2],)"),
}
_METHODS = {
    "good": ("good", "(1)"),
    "bad": ("bad", "()"),
    "slow": ("slow", "()"),
    "lock": ("lock", "()"),
    "later": ("later", "(1)"),
    "tensor": ("tensor", "()"),
    "never": ("never", "()"),
    "static_later": ("static_later", "(1)"),
    "static_tensor": ("static_tensor", "()"),
    "class_later": ("class_later", "(1)"),
    "class_none": ("class_none", "()"),
    "nothing": ("nothing", "()"),
}
_SHORT = 0.25  # seconds: timeout of a call that is expected to expire

_LONG = 20  # timeout of all other calls; long, because the machine may be busy
for _name, (_function, _args) in _FUNCTIONS.items():
    _T = _SHORT if _name in ("slow", "never") else _LONG
    CASES[f"rpc_sync {_name}"] = f"rpc.rpc_sync(to, {_function}, args={_args}, timeout={_T})"
    CASES[f"rpc_async {_name}"] = f"rpc.rpc_async(to, {_function}, args={_args}, timeout={_T}).wait()"
    CASES[f"remote {_name}"] = f"rpc.remote(to, {_function}, args={_args}).to_here(timeout={_T})"
    if "slow" not in _name and "never" not in _name:
        CASES[f"remote at leisure {_name}"] = f"rpc.remote(to, {_function}, args={_args}).to_here()"
        CASES[f"remote, fetched by another {_name}"] = (
            f"rpc.rpc_sync(to, fetch, args=(rpc.remote(me, {_function}, args={_args}), {_T}))"
        ).replace("(me,", "(to,", _function in ("nested", "later_remote", "script_later"))
    CASES[f"remote here {_name}"] = f"rpc.remote(me, {_function}, args={_args}).to_here(timeout={_T})"
# In torch itself these wait for a minute or forever: calls without a timeout, references of scripts owned elsewhere.
# Some raise an error in a cell: functions of `async_execution` that return None.
_ENDLESS = re.compile(r"remote here (slow|never)|.* (later_none|class_none)|.*by another (script_later.*|exits)")
for _name, (_method, _args) in _METHODS.items():
    _T = _SHORT if _name in ("slow", "never") else _LONG
    _call = f"{_method}{_args}"
    CASES[f"proxy rpc_sync {_name}"] = f"reference.rpc_sync(timeout={_T}).{_call}"
    CASES[f"proxy rpc_async {_name}"] = f"reference.rpc_async(timeout={_T}).{_call}.wait()"
    CASES[f"proxy remote {_name}"] = f"reference.remote().{_call}.to_here(timeout={_T})"
_T = _SHORT
CASES = {name: code for name, code in CASES.items() if not _ENDLESS.fullmatch(name)}
CASES |= {
    "timeout of remote": f"wait_for(rpc.remote(to, slow, timeout={_T}), 0.7).to_here()",
    "timeout of remote, never": f"wait_for(rpc.remote(to, never), 0.1).to_here(timeout={_T})",
    "to_here after to_here": f"late = rpc.remote(to, slow)\nfirst = attempt('late.to_here(timeout={_T})')\n"
    "(first, late.to_here(timeout=5))",
    "proxy after to_here": f"late = rpc.remote(to, Late)\nfirst = attempt('late.to_here(timeout={_T})')\n"
    "(first, late.rpc_sync(timeout=5).good(1))",
    "default timeout": f"rpc._set_rpc_timeout({_T})\nrpc.rpc_sync(to, slow)",
    "default timeout of to_here": f"late = rpc.remote(to, slow)\nrpc._set_rpc_timeout({_T})\nlate.to_here()",
    "default timeout of async_execution": f"rpc._set_rpc_timeout({_T})\nrpc.rpc_sync(to, never)",
    "default timeout of a proxy": f"rpc._set_rpc_timeout({_T})\nreference.rpc_sync().slow()",
    "default timeout is told": "rpc._set_rpc_timeout(7)\nrpc.get_rpc_timeout()",
    "timeout of 0": f"rpc._set_rpc_timeout({_T})\nrpc.rpc_sync(to, slow, args=(0.4,), timeout=0)",
    "timeout of 0 of to_here": f"rpc._set_rpc_timeout({_T})\nrpc.remote(to, slow, args=(0.4,), timeout=0).to_here(timeout=0)",
    "default timeout of 0": "rpc._set_rpc_timeout(0)\nrpc.rpc_sync(to, slow, args=(0.1,))",
    **{
        f"timeout {t} of {title}": f"{call[:-1]}timeout={t})"
        for t in ("-2", "0.0001", "float('nan')", "float('inf')", "1e18", "'x'")
        for title, call in (
            ("to_here", "rpc.remote(to, good, args=(1,)).to_here()"),
            ("to_here of a slow call", "rpc.remote(to, slow, args=(0.2,)).to_here()"),
            ("to_here of a known value", "made = rpc.remote(to, good, args=(1,))\nmade.to_here()\nmade.to_here()"),
            ("to_here of an operator", "rpc.remote(to, torch.add, args=(one, one)).to_here()"),
            ("to_here of an own value", "rpc.remote(me, good, args=(1,)).to_here()"),
        )
    },
    "timeout of no number": "rpc.rpc_sync(to, good, args=(1,), timeout='soon')",
    "then": "rpc.rpc_async(to, good, args=(1,)).then(lambda future: future.wait() + 1).wait()",
    "then raises": "rpc.rpc_async(to, good, args=(1,)).then(lambda future: 1 / 0).wait()",
    "then of an error": "rpc.rpc_async(to, bad).then(lambda future: future.wait()).wait()",
    "done callback raises": "future = rpc.rpc_async(to, good, args=(1,))\n"
    "future.add_done_callback(lambda future: 1 / 0)\nfuture.wait()",
    "value of an error": "future = rpc.rpc_async(to, bad)\nattempt('future.wait()')\nfuture.value()",
    "wait_all": "torch.futures.wait_all([rpc.rpc_async(to, good, args=(n,)) for n in range(3)])",
    "wait_all of an error": "torch.futures.wait_all([rpc.rpc_async(to, f) for f in (bad, bad)])",
    "collect_all": "len(torch.futures.collect_all([rpc.rpc_async(to, good, args=(n,)) for n in range(3)]).wait())",
    "a returned reference": "rpc.rpc_sync(to, reference_of, args=(5,)).to_here()",
    "a returned reference of async_execution": "rpc.rpc_sync(to, later_reference, args=(5,)).to_here()",
    "a returned user reference": "rpc.rpc_sync(to, nested_reference, args=(me, 5)).to_here()",
    "a reference to a reference": "rpc.remote(to, reference_of, args=(5,)).to_here().to_here()",
    "a reference to an error, twice": "lost = rpc.remote(to, bad)\n(attempt('lost.to_here()'), attempt('lost.to_here()'))",
    "a proxy of an error": "rpc.remote(to, made_badly).rpc_sync().good(1)",
    "a proxy of an error, async": "rpc.remote(to, made_badly).rpc_async().good(1).wait()",
    "more fetches than threads": "references = [rpc.remote(to, hold, args=('more',)) for _ in range(40)]\n"
    "threads = [threading.Thread(target=one.to_here, kwargs={'timeout': 10}, daemon=True) for one in references]\n"
    "[one.start() for one in threads]; time.sleep(0.3)\n"
    "rpc.rpc_sync(to, let_go, args=('more', 3))\n[one.join(10) for one in threads]\n[one.to_here() for one in references[:2]]",
    "fetched by another while more wait than threads": "its = rpc.remote(me, hold, args=('other',))\n"
    "asked = [rpc.rpc_async(to, fetch, args=(its, 10)) for _ in range(20)]\ntime.sleep(0.3)\n"
    "rpc.rpc_sync(me, let_go, args=('other', 3))\ntorch.futures.wait_all(asked)[:2]",
    "owner": "made = rpc.remote(to, good, args=(1,))\n(str(made.owner()), made.owner_name(), str(rpc.RRef(1).owner()))",
    "names": "(str(rpc.get_worker_info()), str(rpc.get_worker_info(to)), rpc.get_worker_info(to).id)",
    "agent": "agent = rpc._get_current_rpc_agent()\n(str(agent.get_worker_info()), sorted(map(str, agent.get_worker_infos())),"
    " str(agent.get_worker_info(to)), str(agent.get_worker_info(1)))",
    "workers by WorkerInfo": "rpc.rpc_sync(rpc.get_worker_info(to), good, args=(1,))",
    "workers by rank": "rpc.rpc_sync(1, good, args=(1,))",
    "a worker info that travels": "str(rpc.rpc_sync(to, rpc.get_worker_info))",
    "text of a reference": "made = rpc.remote(to, good, args=(1,))\nmade.to_here()\nre.sub(r'local_id=\\d+', 'local_id=N', str(made))",
    "text of an own reference": "re.sub(r'local_id=\\d+', 'local_id=N', str(rpc.RRef(1)))",
    "confirmed": "made = rpc.remote(to, good, args=(1,))\nmade.to_here()\n"
    "any(made.confirmed_by_owner() or time.sleep(0.01) for _ in range(500)), made.is_owner()",
    "type of a reference": "(rpc.remote(to, good, args=(1,))._get_type().__name__,"
    " attempt('rpc.remote(to, bad)._get_type()'))",
    "local_value of a reference of another": "attempt('rpc.remote(to, good, args=(1,)).local_value()')[:2]",
    "RemoteModule": "RemoteModule(to, nn.Linear, args=(2, 1)).forward(one).shape",
    "RemoteModule raises": "RemoteModule(to, Bad).forward(one)",
    "RemoteModule asynchronously": "RemoteModule(to, Bad).forward_async(one).wait()",
    "RemoteModule of what fails": "RemoteModule(to, nn.Linear, args=('two', 1))",
    "RemoteModule parameters": "[one.to_here().shape for one in RemoteModule(to, nn.Linear, args=(2, 1)).remote_parameters()]",
    "context": "with dist_autograd.context() as context: found = (context >> 48, rpc.rpc_sync(to, this_context) == context,"
    " dist_autograd._current_context()._context_id() == context, dist_autograd._is_valid_context(context),"
    " dist_autograd._get_max_id() >> 48)\nfound",
    "context of the other": "rpc.rpc_sync(to, context_there)",
    "backward": "with dist_autograd.context() as context:\n    x = torch.ones(2, requires_grad=True)\n"
    "    dist_autograd.backward(context, [rpc.rpc_sync(to, double, args=(x,)).sum()])\n"
    "    found = dist_autograd.get_gradients(context)[x], sorted(dist_autograd._retrieve_context(context)._known_worker_ids()),"
    " [key >> 48 for key in dist_autograd._retrieve_context(context)._send_functions()],"
    " [key >> 48 for key in dist_autograd._retrieve_context(context)._recv_functions()]\nfound",
    "backward in TorchScript": "with dist_autograd.context() as context:\n    x = torch.ones(2, requires_grad=True)\n"
    "    dist_autograd.backward(context, [rpc.rpc_sync(to, double, args=(x,)).sum()])\n"
    "    found = gradients_of(context, x)\nfound",
    "backward of a reference": "with dist_autograd.context() as context:\n    x = torch.ones(2, requires_grad=True)\n"
    "    rpc.remote(to, total, args=(x,)).backward(context)\n    found = dist_autograd.get_gradients(context)[x]\nfound",
    "backward raises": "with dist_autograd.context() as context:\n    x = torch.ones(2, requires_grad=True)\n"
    "    dist_autograd.backward(context, [rpc.rpc_sync(to, bad_backward, args=(x,)).sum()])",
    "backward of nothing": "with dist_autograd.context() as context: dist_autograd.backward(context, [torch.ones(1).sum()])",
    "backward twice": "with dist_autograd.context() as context:\n    x = torch.ones(2, requires_grad=True)\n"
    "    loss = rpc.rpc_sync(to, double, args=(x,)).sum()\n"
    "    dist_autograd.backward(context, [loss], retain_graph=True)\n    dist_autograd.backward(context, [loss])\n"
    "    found = dist_autograd.get_gradients(context)[x]\nfound",
    "backward without a context": "dist_autograd.backward(77, [torch.ones(1, requires_grad=True).sum()])",
    "gradients without a context": "dist_autograd.get_gradients(77)",
    "gradients there": "with dist_autograd.context() as context:\n    there = rpc.remote(to, parameter)\n"
    "    x = rpc.rpc_sync(to, use, args=(there,))\n    dist_autograd.backward(context, [x.sum()])\n"
    "    found = rpc.rpc_sync(to, my_gradient, args=(context, there))\nfound",
    "DistributedOptimizer": "with dist_autograd.context() as context:\n    there = rpc.remote(to, parameter)\n"
    "    optimizer = DistributedOptimizer(torch.optim.SGD, [there], lr=0.5)\n"
    "    dist_autograd.backward(context, [rpc.rpc_sync(to, use, args=(there,)).sum()])\n    optimizer.step(context)\n"
    "there.to_here()",
    "DistributedOptimizer without TorchScript": "with dist_autograd.context() as context:\n"
    "    there = rpc.remote(to, parameter)\n    optimizer = DistributedOptimizer(torch.optim.ASGD, [there], lr=0.5)\n"
    "    dist_autograd.backward(context, [rpc.rpc_sync(to, use, args=(there,)).sum()])\n    optimizer.step(context)\n"
    "there.to_here()",
    "DistributedOptimizer without a context": "DistributedOptimizer(torch.optim.SGD, [rpc.remote(to, parameter)], lr=0.5).step(77)",
    "profile of a call": "without_races(keys(lambda: rpc.rpc_sync(to, torch.add, args=(one, one))))",
    "profile of an old call": "without_races(keys(lambda: rpc.rpc_sync(to, torch.add, args=(one, one)), use_kineto=False))",
    "profile of an old call of a function": "without_races(keys(lambda: rpc.rpc_sync(to, good, args=(one,)), use_kineto=False))",
    "profile of an old remote": "without_races(keys(lambda: rpc.remote(to, good, args=(one,)).to_here(), use_kineto=False))",
    "nodes of an old profile": "keys(lambda: rpc.rpc_sync(to, torch.add, args=(one, one)), lambda event: event.node_id, use_kineto=False)",
    "profile of a backward": "without_races(keys(backward))",
    "old profile of a backward": "without_races(keys(backward, use_kineto=False))",
    "mode of a backward": "with Seen() as seen: backward()\nwithout_races(sorted(seen.names))",
    "hooks of a backward": "hooked()",
}
# Cases that wait, and cases that are similar to others.
_LONG_ONES = re.compile(
    r"(rpc_async|remote at leisure|remote,|remote here|proxy) .*|.*(timeout|slow|never|without TorchScript).*"
)
QUICK = {name: code for name, code in CASES.items() if not _LONG_ONES.fullmatch(name)}
LONG = {name: code for name, code in CASES.items() if name not in QUICK}
