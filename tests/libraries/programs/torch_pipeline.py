"""A pipeline of torch.distributed.pipelining with one stage on each rank, in two schedules."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(rank)
        module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=8, loss_fn=functional.mse_loss)
        torch.manual_seed(7)
        inputs, target = torch.randn(16, 8), torch.randn(16, 8)
        losses = []
        for _ in range(3):
            if rank == 0:
                schedule.step(inputs)
            elif rank == world_size - 1:
                schedule.step(target=target, losses=losses)
            else:
                schedule.step()
        gradient = module[0].weight.grad.sum().item()
        print(
            kind.__name__,
            gradient.hex(),
            module[0].bias.grad.sum().item().hex(),
            *(loss.item().hex() for loss in losses),
        )
    dist.destroy_process_group()


main()
