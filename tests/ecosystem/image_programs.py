"""The programs that train with diffusers, timm, bitsandbytes and torchao."""

from program import Program

_CONVOLUTIONS = ("cuDNN's workspaces in convolutions",)
_TIMM = ("resnet50", "vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0")
_EAGER = "--assume compile=eager"

PROGRAMS: tuple[Program, ...] = (
    Program(name="ResNet-50 as plain code", packages=(), file="pictures.py", arguments="resnet", assumes=_CONVOLUTIONS),
    *(
        Program(
            name=f"timm, {name}",
            packages=("timm",),
            file="pictures.py",
            arguments=name,
            assumes=_CONVOLUTIONS,
            quick=name == "convnext_atto",
        )
        for name in _TIMM
    ),
    *(
        Program(
            name=f"diffusers, {kind}",
            packages=("diffusers",),
            file="pictures.py",
            arguments=name,
            assumes=_CONVOLUTIONS,
        )
        for kind, name in (("UNet2DConditionModel", "unet"), ("DiTTransformer2DModel", "dit"))
    ),
    *(
        Program(
            name=f"bitsandbytes, {name}",
            packages=("bitsandbytes",),
            file="small_states.py",
            arguments=f"bitsandbytes {name}",
            quick=name == "AdamW8bit",
        )
        for name in ("AdamW8bit", "Lion8bit", "AdamW")
    ),
    Program(
        name="bitsandbytes, PagedAdamW8bit",
        packages=("bitsandbytes",),
        file="small_states.py",
        arguments="bitsandbytes PagedAdamW8bit",
        stops="not available in CPU-only version of bitsandbytes",
    ),
    *(
        Program(
            name=f"bitsandbytes, {kind} weights",
            packages=("bitsandbytes",),
            file="small_weights.py",
            arguments=kind,
            quick=kind == "4bit",
        )
        for kind in ("4bit", "8bit")
    ),
    *(
        Program(
            name=f"torchao, {name}",
            packages=("torchao",),
            file="small_states.py",
            arguments=f"torchao {name}",
            options=_EAGER,
            assumes=("compiled code, which ran uncompiled",),
        )
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
    ),
    Program(name="torchao, int8 weights", packages=("torchao",), file="small_weights.py", arguments="int8"),
    Program(
        name="torchao, float8 training",
        packages=("torchao",),
        file="small_weights.py",
        arguments="float8",
        equal=("parameters", "gradients", "optimizer_state"),
        why="a weight in float8 is made of the scaled one, so it is no copy of a parameter but an activation",
    ),
)
