"""Trains on two ranks in a notebook. ``# %%`` begins a cell, for editors that know it; or copy them to Jupyter."""

# %%
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
data = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

# %%
L.seed_everything(0, verbose=False)
model = Model()
trainer = L.Trainer(strategy="fsdp2", devices=2, max_epochs=2, logger=False, enable_progress_bar=False)
trainer.fit(model, data)

# %% The ranks have ended. The weights and metrics are here, and the checkpoint is on disk.
with torch.no_grad():
    print("loss of the last step:", trainer.callback_metrics["loss"].item())
    print("loss over all data:", mse_loss(model.net(x), y).item())
    print("checkpoint:", trainer.checkpoint_callback.best_model_path)


# %% Fabric runs a function on the ranks, and returns what it returns on the first.
def train(fabric: L.Fabric) -> list[float]:
    """Train for an epoch; the losses."""
    fabric.seed_everything(0, verbose=False)
    module = Model()
    net, optimizer = fabric.setup(module.net, torch.optim.AdamW(module.parameters(), lr=1e-2))
    losses = []
    for rows, want in fabric.setup_dataloaders(data):
        optimizer.zero_grad()
        loss = mse_loss(net(rows), want)
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return losses


fabric = L.Fabric(strategy="fsdp2", devices=2)
print("losses under Fabric:", fabric.launch(train))
