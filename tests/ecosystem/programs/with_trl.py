"""trl's SFTTrainer, on texts and a tokenizer that are made here."""

import argparse
import tempfile

from datasets import Dataset
from models import MODELS
from sums import watch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

words = {f"word{number}": number for number in range(998)} | {"<eos>": 998, "<pad>": 999}
plain = Tokenizer(models.WordLevel(words, unk_token="word0"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>")
texts = [" ".join(f"word{(row * number) % 998}" for number in range(40 + row)) for row in range(16)]

model, _ = MODELS["llama"]()
watch(model, model.lm_head.weight)  # the loss multiplies it, in chunks
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        per_device_train_batch_size=4,
        max_steps=2,
        max_length=64,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        bf16=given.bf16,
        gradient_checkpointing=given.checkpointing,
        use_cpu=given.device == "cpu",
    )
    data = Dataset.from_dict({"text": texts})
    SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()
