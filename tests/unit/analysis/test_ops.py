"""Torch's ops in words for people."""

import pytest

from ampmem.analysis.ops import plain_kind, plain_op, result_of


@pytest.mark.parametrize(
    ("op", "plain", "kind"),
    [
        ("aten::mul", "mul", "element-wise ops"),
        ("aten::div_", "div", "element-wise ops"),
        ("aten::native_layer_norm", "layer norm", "norms"),
        ("aten::_native_batch_norm_legit", "batch norm", "norms"),
        ("aten::cudnn_batch_norm", "batch norm", "norms"),
        ("aten::_fused_rms_norm", "rms norm", "norms"),
        ("aten::linalg_vector_norm", "linalg vector norm", "linalg vector norm"),
        ("aten::_log_softmax", "log-softmax", "the loss"),
        ("aten::nll_loss_forward", "nll loss", "the loss"),
        ("aten::nll_loss2d_forward", "nll loss", "the loss"),
        ("aten::binary_cross_entropy_with_logits", "binary cross entropy with logits", "the loss"),
        ("aten::mse_loss", "mse loss", "the loss"),
        ("aten::_softmax", "softmax", "softmax"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash attention", "attention"),
        ("aten::_efficient_attention_forward", "memory-efficient attention", "attention"),
        ("aten::scaled_dot_product_attention", "attention", "attention"),
        ("aten::addmm", "addmm", "matmuls"),
        ("aten::bmm", "bmm", "matmuls"),
        ("aten::cudnn_convolution", "convolution", "convolutions"),
        ("aten::_cudnn_rnn", "rnn", "RNNs"),
        ("aten::mkldnn_rnn_layer", "rnn layer", "RNNs"),
        ("aten::max_pool2d_with_indices", "max pool2d", "pooling"),
        ("aten::native_dropout", "dropout", "dropout"),
        ("aten::gelu", "gelu", "gelu"),
        ("aten::relu_", "relu", "relu"),
        ("aten::_to_copy", ".to()", ".to()"),
        ("Square", "Square", "Square"),
        ("CompiledFunctionBackward", "compiled code", "compiled code"),
        ("my_lib::layer_norm", "my_lib::layer_norm", "my_lib::layer_norm"),
        ("", "", ""),
    ],
)
def test_ops_have_plain_names_and_kinds(op: str, plain: str, kind: str) -> None:
    assert plain_op(op) == plain
    assert plain_kind(op) == kind


@pytest.mark.parametrize(
    ("op", "dtype", "shape", "words"),
    [
        ("aten::_log_softmax", "float32", "[8192, 50304]", "float32 log-probabilities [8192, 50304]"),
        ("aten::addmm", "bfloat16", "", "bfloat16 output of addmm"),
        ("aten::ge", "bool", "[8]", "bool mask [8]"),
        ("AdamW.step", None, "", "AdamW.step"),
    ],
)
def test_a_tensor_is_called_what_it_is(op: str, dtype: str | None, shape: str, words: str) -> None:
    assert result_of(op, dtype, shape) == words
