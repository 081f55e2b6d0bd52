"""Lightning's Trainer."""

import argparse

import lightning
import torch
from data import Rows
from models import MODELS
from sums import watch
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """A model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model, _ = MODELS["gpt2"]()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

module = Module()
watch(module)
trainer = lightning.Trainer(
    accelerator="cpu" if given.device == "cpu" else "gpu",
    devices=1,
    max_steps=2,
    precision="bf16-mixed" if given.bf16 else "32-true",
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(module, DataLoader(Rows(), batch_size=4))
