"""A training with Lightning's Trainer on CPU ranks. Prints the losses of each rank, to the last bit."""

import tempfile

import lightning
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.regression import MeanSquaredError


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.error = MeanSquaredError()
        self.losses = []

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        loss = functional.mse_loss(self.layers(inputs), target)
        self.losses.append(loss.item().hex())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, target = batch
        self.error.update(self.layers(inputs), target)
        self.log("error", self.error)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(0, workers=True)
    inputs = torch.randn(256, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    model = Net()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
    measured = trainer.validate(model, DataLoader(data, batch_size=8), verbose=False)
    print(f"{type(trainer.strategy).__name__} {trainer.global_rank} of {trainer.world_size}")
    print("losses", *model.losses)
    print("mean", trainer.callback_metrics["error"].item().hex(), measured[0]["error"].hex())
    print("weights", model.layers[0].weight.sum().item().hex())


main()
