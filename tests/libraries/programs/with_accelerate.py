"""A training with accelerate, as in its quick tour. Prints the losses of each rank, to the last bit."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def main():
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    inputs = torch.randn(256, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for _ in range(2):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = functional.mse_loss(model(batch), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item().hex())
    everybody = accelerator.gather_for_metrics(torch.tensor([float.fromhex(losses[-1])]))
    weights = accelerator.unwrap_model(model)[0].weight
    print(f"{accelerator.distributed_type.value} {accelerator.process_index} of {accelerator.num_processes}")
    print("losses", *losses)
    print("everybody", everybody.tolist(), "weights", weights.sum().item().hex())
    accelerator.end_training()


main()
