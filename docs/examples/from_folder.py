"""Go on from the folder that llama.py has exported, on any number of ranks: ``python from_folder.py fsdp2``."""

import sys

import lightning as L
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_core.lightning import LoadPretrained, SavePretrained
from llama import Llama, text


class FromFolder(Llama):
    def __init__(self):
        L.LightningModule.__init__(self)

    def configure_model(self):
        if not hasattr(self, "model"):
            with self.trainer.init_module(empty_init=True):  # neither memory nor values yet
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("my-llama"))


if __name__ == "__main__":
    L.seed_everything(0)
    read = LoadPretrained("my-llama")
    write = SavePretrained("further", every_n_epochs=1, keep=2)
    trainer = L.Trainer(
        strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=2, logger=False, callbacks=[read, write]
    )
    trainer.fit(FromFolder(), text(batch_size=8))
    if trainer.is_global_zero:
        last = AutoModelForCausalLM.from_pretrained(write.written[-1])
        print(f"Read {read.loaded.tensors} tensors; the last of {len(write.written)} folders: {type(last).__name__}")
