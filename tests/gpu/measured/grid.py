"""The calls whose workspaces are measured: convolutions of well-known networks, and matrix products."""

from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

Shape: TypeAlias = tuple[tuple[str, int], ...]

PASSES: Final = ("forward", "backward-data", "backward-weight")
PRODUCTS: Final = ("mm", "addmm", "bmm", "linear-gelu")
DTYPES: Final = ("fp32", "bf16", "tf32", "fp16")
_FIELDS: Final = ("batch", "channels", "out", "image", "kernel", "stride", "groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call. ``call`` is a pass of a convolution, or a product; ``benchmark`` is ``torch.backends.cudnn``'s."""

    kind: str
    call: str
    dtype: str
    benchmark: bool
    shape: Shape

    @property
    def group(self) -> str:
        """What is counted together."""
        tried = ", benchmark" if self.benchmark else ""
        return f"{self.kind} {self.call} {self.dtype}{tried}"

    def row(self) -> dict[str, object]:
        """What a row of the file begins with."""
        return {
            "kind": self.kind,
            "pass": self.call,
            "dtype": self.dtype,
            "benchmark": self.benchmark,
            "shape": dict(self.shape),
        }

    def __getitem__(self, name: str) -> int:
        return dict(self.shape)[name]

    def __str__(self) -> str:
        return f"{self.group} {' '.join(f'{name}={value}' for name, value in self.shape)}"


CONVOLUTIONS: Final = (
    # batch, channels, out, image, kernel, stride, groups
    (32, 3, 64, 224, 7, 2, 1),  # ResNet's stem
    (32, 64, 64, 56, 1, 1, 1),
    (32, 64, 64, 56, 3, 1, 1),
    (32, 64, 256, 56, 1, 1, 1),
    (32, 128, 128, 56, 3, 2, 1),
    (32, 128, 128, 28, 3, 1, 1),
    (32, 256, 512, 56, 1, 2, 1),
    (32, 256, 256, 28, 3, 2, 1),
    (32, 256, 256, 14, 3, 1, 1),
    (32, 512, 2048, 7, 1, 1, 1),
    (32, 512, 512, 7, 3, 1, 1),
    (8, 64, 64, 56, 3, 1, 1),  # the same with other batches and images
    (128, 64, 64, 56, 3, 1, 1),
    (8, 256, 256, 14, 3, 1, 1),
    (128, 256, 256, 14, 3, 1, 1),
    (4, 64, 64, 224, 3, 1, 1),
    (4, 128, 128, 112, 3, 1, 1),  # VGG, U-Net
    (4, 512, 512, 28, 3, 1, 1),
    (1, 64, 64, 512, 3, 1, 1),
    (32, 16, 16, 32, 3, 1, 1),
    (32, 3, 16, 32, 3, 1, 1),
    (32, 3, 32, 224, 3, 2, 1),  # MobileNet
    (32, 96, 96, 56, 3, 1, 96),
    (32, 144, 144, 56, 3, 2, 144),
    (32, 240, 240, 28, 5, 1, 240),
    (32, 672, 672, 14, 5, 2, 672),
    (32, 3, 96, 224, 4, 4, 1),  # ConvNeXt
    (32, 96, 96, 56, 7, 1, 96),
    (32, 384, 384, 14, 7, 1, 384),
    (32, 96, 192, 56, 2, 2, 1),
    (32, 128, 128, 56, 3, 1, 32),  # ResNeXt
    (32, 256, 256, 28, 3, 1, 32),
    (32, 3, 768, 224, 16, 16, 1),  # ViT's patches
    (8, 320, 320, 64, 3, 1, 1),  # a diffusion model's U-Net
    (8, 1280, 1280, 16, 3, 1, 1),
    (32, 64, 64, 28, 5, 1, 1),
)
_MATRICES: Final = (
    # batch, m, k, n
    (1, 8192, 768, 3072),
    (1, 8192, 3072, 768),
    (1, 8192, 768, 50257),
    (1, 4096, 4096, 4096),
    (1, 64, 1024, 1024),
    (1, 768, 8192, 768),
    (96, 1024, 64, 1024),
    (8, 256, 256, 256),
)


def jobs(most: int = 0) -> list[Job]:
    """All of them, what is worth most first; with ``most`` only so many shapes of convolutions and of matrices."""
    shapes, matrices = CONVOLUTIONS[: most or None], _MATRICES[: most or None]
    found = [
        Job(
            kind="product",
            call=call,
            dtype=dtype,
            benchmark=False,
            shape=tuple(zip(("batch", "m", "k", "n"), shape, strict=True)),
        )
        for call, dtype, shape in product(PRODUCTS, DTYPES, matrices)
        if (shape[0] > 1) == (call == "bmm") or most
    ]
    for benchmark, last, dtype in product((False, True), (0, 1), DTYPES):
        found += [
            Job(
                kind="convolution",
                call=call,
                dtype=dtype,
                benchmark=benchmark,
                shape=(*_named(shape), ("channels_last", last)),
            )
            for shape, call in product(shapes, PASSES)
        ]
    return found


def _named(shape: tuple[int, ...]) -> Shape:
    """With the padding that keeps the image's size, but for patches, which have none."""
    kernel, stride = shape[4], shape[5]
    padding = 0 if kernel <= stride else kernel // 2
    return (*zip(_FIELDS, shape, strict=True), ("padding", padding))
