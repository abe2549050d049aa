"""Train a small Llama on this file's own bytes, and export it: ``python llama.py fsdp2``."""

import sys
from pathlib import Path

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fsdp_core

CONFIG = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)


class Llama(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(CONFIG)

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print("loss", self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-5)


def text(batch_size):
    read = torch.tensor(list(Path(__file__).read_bytes()))
    return torch.utils.data.DataLoader(read[:1536].view(48, 32), batch_size)


if __name__ == "__main__":
    L.seed_everything(0)
    trainer = L.Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=4, logger=False)
    module = Llama()
    trainer.fit(module, text(batch_size=8))
    trainer.save_checkpoint("llama.ckpt")

    weights = fsdp_core.full_state_dict(module.model)  # on every process
    if trainer.is_global_zero:
        module.model.save_pretrained("my-llama", state_dict=weights)

        saved = fsdp_core.load_state_dict("llama.ckpt")
        for name, weight in LlamaForCausalLM.from_pretrained("my-llama").state_dict().items():
            assert torch.equal(weight, saved[f"model.{name}"]), name
        print("The exported Llama is the one in the checkpoint.")
