"""FSDP2 with checkpoints of torch.distributed.checkpoint, one of them saved in the background."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(number):
        model(torch.ones(2, 8) * (number + dist.get_rank())).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("weights", model[0].weight.full_tensor().sum().item().hex())

    def state():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    for number in range(3):
        step(number)
    dcp.save(state(), checkpoint_id=f"{folder[0]}/now")
    dcp.async_save(state(), checkpoint_id=f"{folder[0]}/later").result()
    for name in ("now", "later"):
        step(3)
        loaded = state()
        dcp.load(loaded, checkpoint_id=f"{folder[0]}/{name}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    step(3)
    dist.destroy_process_group()


main()
