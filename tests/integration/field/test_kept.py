"""What activations are called, against what a program itself sees autograd keep."""

from pathlib import Path

from support import field


def test_the_bytes_that_an_lstm_keeps_are_no_mask(tmp_path: Path) -> None:
    """On most CPUs it keeps a workspace of its library, in bytes; one that keeps none must find none."""
    ran = field.record(tmp_path, "lstm")
    kept = {(group["kind"], group["dtype"]): group["bytes"] for group in ran.summary["activations"]}
    assert kept.get(("workspace of mkldnn_rnn_layer", "uint8"), 0) == ran.counted["torch.uint8"]
    assert kept["masks", "bool"] == ran.counted["torch.bool"] > 0
    assert {dtype for kind, dtype in kept if kind == "masks"} == {"bool"}
