"""The programs that train with transformers and what stands on it: accelerate, Lightning, peft, trl."""

from program import Program

_MODELS = ("bert", "gpt2", "llama", "qwen", "t5", "vit", "whisper")
_TRAINER = ("transformers", "accelerate")
_FINITE = ("was answered no at ", "trainer.py")
"""transformers' Trainer asks whether the loss is a number."""

_WORKSPACES = ("cuDNN's workspaces in convolutions",)
_TAKEN = {"vit": _WORKSPACES, "whisper": _WORKSPACES}

PROGRAMS = (
    *(
        Program(
            name=f"transformers, {model}",
            packages=("transformers",),
            file="plain_loop.py",
            arguments=model,
            assumes=_TAKEN.get(model, ()),
            quick=model == "qwen",
        )
        for model in _MODELS
    ),
    *(
        Program(
            name=f"transformers, {model}, gradient checkpointing",
            packages=("transformers",),
            file="plain_loop.py",
            arguments=f"{model} --checkpointing",
        )
        for model in ("llama", "t5")
    ),
    Program(name="from_pretrained", packages=("transformers",), file="pretrained.py"),
    Program(
        name="from_pretrained, bfloat16", packages=("transformers",), file="pretrained.py", arguments="--dtype bfloat16"
    ),
    Program(
        name="from_pretrained, device_map",
        packages=("transformers", "accelerate"),
        file="pretrained.py",
        arguments="--device-map",
    ),
    Program(
        name="from_pretrained, device_map, bfloat16",
        packages=("transformers", "accelerate"),
        file="pretrained.py",
        arguments="--device-map --dtype bfloat16",
    ),
    Program(name="Trainer", packages=_TRAINER, file="hf_trainer.py", own="--bf16", assumes=_FINITE),
    Program(
        name="Trainer, gradient checkpointing",
        packages=_TRAINER,
        file="hf_trainer.py",
        arguments="--checkpointing",
        own="--bf16",
        assumes=_FINITE,
    ),
    Program(name="accelerate", packages=_TRAINER, file="with_accelerate.py", own="--bf16"),
    Program(name="Lightning", packages=("lightning", "transformers"), file="with_lightning.py", own="--bf16"),
    Program(name="peft, LoRA", packages=("peft", "transformers"), file="with_peft.py", own="--bf16"),
    Program(
        name="trl, SFT",
        packages=("trl", "datasets", "transformers"),
        file="with_trl.py",
        own="--bf16",
        assumes=_FINITE,
    ),
    Program(
        name="trl, SFT, gradient checkpointing",
        packages=("trl", "datasets", "transformers"),
        file="with_trl.py",
        arguments="--checkpointing",
        own="--bf16",
        assumes=_FINITE,
    ),
)
