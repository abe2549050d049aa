"""Fine-tune what llama.py has exported, with LoRA: ``python lora.py fsdp2 2``, then ``4``."""

import sys
from pathlib import Path

import lightning as L
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

import fsdp_core


class LoRA(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
        self.model = get_peft_model(LlamaForCausalLM.from_pretrained("my-llama").train(), config)

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.print("loss", self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=1e-5)


def text(batch_size):
    read = torch.tensor(list(Path(__file__).read_bytes()))
    return torch.utils.data.DataLoader(read[:1536].view(48, 32), batch_size)


if __name__ == "__main__":
    L.seed_everything(0)
    strategy, epochs = sys.argv[1], int(sys.argv[2])
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=epochs, logger=False)
    module = LoRA()
    trainer.fit(module, text(batch_size=8), ckpt_path="lora.ckpt" if Path("lora.ckpt").exists() else None)
    trainer.save_checkpoint("lora.ckpt")

    with fsdp_core.gathered(module.model):  # on every process
        if trainer.is_global_zero:
            module.model.save_pretrained("my-adapter")  # the adapters alone

    if trainer.is_global_zero:
        saved = fsdp_core.load_state_dict("lora.ckpt")
        fresh = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("my-llama"), "my-adapter")
        for name, weight in fresh.state_dict().items():
            assert torch.equal(weight, saved[f"model.{name}"]), name
        print("The base and the exported adapters make the model in the checkpoint.")
