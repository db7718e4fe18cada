"""`torch.distributed.rpc` on ranks."""

from __future__ import annotations


def test_rpc_calls_functions_of_a_cell_on_another_rank(make_session):
    """At the session's store, twice, and at an address of the cell's own, in the environment or the options; it listens
    on loopback only."""
    session = make_session(2)
    code = (
        "import os, psutil\nfrom torch.distributed import rpc\n"
        "class Twice:\n    def __init__(self, x): self.x = 2 * x\n"
        "def double(x): return Twice(x)\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=world_size, rpc_backend_options=options)\n"
        "answer = rpc.rpc_sync(f'worker{1 - rank}', double, args=(rank + 1,)).x\n"
        "me = psutil.Process()\nfound = getattr(me, 'net_connections', None) or me.connections  # of psutil 5\n"
        "listening = {c.laddr.ip for c in found() if c.status == 'LISTEN'}\n"
        "rpc.shutdown()\nanswer, listening - {'127.0.0.1'}"
    )
    own = "import os, socket\nbox = [None]\nif rank == 0:\n    s = socket.create_server(('127.0.0.1', 0))\n"
    own += "    box = [s.getsockname()[1]]; s.close()\ndist.broadcast_object_list(box, src=0)\n"
    options = "options = rpc.TensorPipeRpcBackendOptions(init_method=f'tcp://localhost:{box[0]}')\n"
    environment = "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(box[0]))\n"
    session.run("from torch.distributed import rpc; options = None")
    for before in ("", "", own + options, own + environment + "options = None\n"):
        result = session.run(before + code)
        found = [result[rank].result for rank in range(2)]
        if before:
            assert [one.partition(",")[0] for one in found] == ["(2", "(4"]
        else:
            assert found == ["(2, set())", "(4, set())"]
