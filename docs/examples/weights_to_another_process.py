"""Train, and let another process generate with the current weights: ``python weights_to_another_process.py fsdp2``."""

import sys

import lightning as L
import torch
import torch.multiprocessing as mp

import fsdp_core

STEPS = 3


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def serve(updates, answers):
    """The other process: holds a whole model, and fills it with what has changed."""
    model = new_model()
    weights = model.state_dict()
    while (update := updates.get()) is not None:
        name, tensor = update
        if name == "all sent":
            answers.put(model(torch.ones(1, 8)).item())
        else:
            weights[name].copy_(tensor)  # from memory that both processes see
            del update, tensor


class Trained(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = new_model()
        self.model[0].requires_grad_(False)  # as the base of LoRA: sent once

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.model[2].parameters(), lr=0.1)


class SendWeights(L.Callback):
    """Sends what has changed after each step, to a process that rank 0 starts."""

    def on_train_start(self, trainer, module):
        self.sent = fsdp_core.SentWeights()
        if trainer.is_global_zero:
            processes = mp.get_context("spawn")
            self.updates, self.answers = processes.Queue(), processes.Queue()
            self.server = processes.Process(target=serve, args=(self.updates, self.answers), daemon=True)
            self.server.start()

    def on_train_batch_end(self, trainer, module, *_):
        names = []
        for name, tensor in fsdp_core.stream_weights(module.model, changed_since=self.sent):  # on every rank
            names.append(name)
            if trainer.is_global_zero:
                self.updates.put((name, tensor.cpu().share_memory_()))
        if trainer.is_global_zero:
            self.updates.put(("all sent", None))
            print(
                f"step {trainer.global_step}: sent {', '.join(names)}; it answers {self.answers.get(timeout=120):.6f}"
            )

    def on_train_end(self, trainer, module):
        with fsdp_core.gathered(module.model):
            if trainer.is_global_zero:
                print(f"trained: {module.model(torch.ones(1, 8)).item():.6f}")
                self.updates.put(None)
                self.server.join()


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy=sys.argv[1],
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SendWeights()],
    )
    trainer.fit(Trained(), torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=4))
