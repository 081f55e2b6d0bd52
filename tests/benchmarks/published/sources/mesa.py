"""What vision transformers take in the training script of DeiT, as the authors of Mesa measured it without theirs."""

from published.runs import PublishedRun


def _run(name: str, model: str, megabytes: int, drop_path: float) -> PublishedRun:
    return PublishedRun(
        key=f"mesa/{name}-b128",
        source="ziplab/Mesa: README.md, train memory without Mesa at batch 128; its script: HubHop/deit-mesa, main.py",
        precision="amp-fp16",
        gpu="v100-32",
        address="https://github.com/ziplab/Mesa",
        torch="1.7.1",
        what="allocated",
        real=megabytes << 20,
        resolution=1 << 20,
        command=("timm_train.py", model, "128", "--like", "deit", "--drop-path", str(drop_path)),
        environment="timm",
        why="not explained; the authors' models are put together from layers of their own, without Mesa too",
    )


RUNS = (
    _run("deit-ti", "deit_tiny_patch16_224", 4171, 0.1),
    _run("deit-s", "deit_small_patch16_224", 8459, 0.1),
    _run("deit-b", "deit_base_patch16_224", 17691, 0.1),
    _run("swin-ti", "swin_tiny_patch4_window7_224", 11812, 0.2),
)
