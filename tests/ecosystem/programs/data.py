"""Data made in memory: rows of tokens, and a tokenizer of single words."""

import torch
from models import tokens
from torch.utils.data import Dataset


class Rows(Dataset[dict[str, torch.Tensor]]):
    """So many rows of text, each its own target."""

    def __init__(self, count: int = 16) -> None:
        self.batch = tokens(rows=count)

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.batch.items()}
