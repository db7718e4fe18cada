"""Metrics of torchmetrics, which gather their states from all ranks. Prints the values of each rank."""

import os

import torch
import torch.distributed as dist
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    metrics = MetricCollection([MulticlassAccuracy(num_classes=4), MulticlassAUROC(num_classes=4)])
    mean, everything = MeanMetric(), CatMetric()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3 + rank % 2):  # not the same number of samples on all ranks
        scores = torch.rand(8, 4, generator=generator).softmax(1)
        metrics.update(scores, torch.randint(0, 4, (8,), generator=generator))
        mean.update(scores)
        everything.update(scores[:, 0])
    values = {name: value.item().hex() for name, value in metrics.compute().items()}
    print(values, mean.compute().item().hex(), len(everything.compute()), everything.compute().sum().item().hex())
    metrics.reset()
    dist.destroy_process_group()


main()
