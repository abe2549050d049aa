"""LightningCLI over a small transformer: nothing in this file knows about sharding, the configuration does.

python cli.py fit --config fsdp2.yaml
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Block(nn.Module):
    """A norm and an MLP, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape (rows, width), as what comes back."""
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x


class Net(LightningModule):
    """Learns to sum a row of numbers.

    Args:
        width: How many numbers.
        depth: How many blocks.
    """

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)
        self.width = width

    def training_step(self, x: Tensor) -> Tensor:
        """The loss of a batch."""
        want = x.sum(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.mse_loss(self.head(x), want)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Batches of 8 rows."""
        rows = torch.randn(64, self.width, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=8)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over what may be shards."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    LightningCLI(Net)
