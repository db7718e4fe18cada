"""A training with transformers' Trainer: a tiny GPT-2, created from its configuration. Prints the losses of each rank,
to the last bit."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Texts(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 64, (128, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), eval_dataset=Texts())
    trainer.train()
    print(f"{arguments.parallel_mode.value} {arguments.process_index} of {arguments.world_size}")
    print("losses", *(float(entry["loss"]).hex() for entry in trainer.state.log_history if "loss" in entry))
    print("eval", trainer.evaluate()["eval_loss"].hex())
    print("weights", model.transformer.wte.weight.sum().item().hex())


main()
