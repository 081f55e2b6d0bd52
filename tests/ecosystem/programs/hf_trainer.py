"""transformers' Trainer."""

import argparse
import tempfile

import torch
from data import Rows
from models import MODELS
from sums import watch
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

model, _ = MODELS["gpt2"]()
watch(model)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=given.bf16,
        use_cpu=given.device == "cpu",
        **({"gradient_checkpointing": True} if given.checkpointing else {}),
    )
    torch.manual_seed(0)
    Trainer(model, arguments, train_dataset=Rows()).train()
