"""How a script is told to use the GPU, read from its own code: the option that people forget."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

_DEVICE = {"device", "cuda", "accel", "accelerator", "gpu"}
_BESIDE = {"use", "with", "enable", "on", "no", "disable", "without", "type"}
"""Words that may stand beside one of those: ``--use-cuda`` is such an option, ``--num-gpu`` and ``--ngpu`` are not."""
_OFF = {"no", "disable", "without"}
_FLAGS = {"store_true", "store_false", "store_const"}
_SAYS_DEVICE = re.compile(r"(.*\W)?(device|accelerator)")
_PLAIN = "move the model and the batch to the device cuda, as for a real GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option of the script's: ``--device``, ``--accel``. ``flag`` when it takes no value."""

    name: str
    flag: bool

    @property
    def words(self) -> set[str]:
        return set(self.name.lower().replace("_", "-").strip("-").split("-"))

    @property
    def off(self) -> bool:
        """Whether it keeps the script off the GPU."""
        return bool(self.words & _OFF)


def how_to_use_the_gpu(script: str, arguments: Sequence[str]) -> str:
    """What to do so that ``script``, which was given ``arguments``, uses the GPU.

    Of an option is spoken only where the script's own code has it, or where it was given.
    """
    given = _sent_to_cpu(arguments)
    if given:
        return f"the script was given {given}: give it {given.removesuffix('cpu')}cuda"
    options = [option for file in _files(script) for option in _options(file)]
    for option in options:
        if option.off and option.name in arguments:
            return f"the script was given {option.name}: leave it out"
    # A flag says all; of options that take a value the one is best whose values are known.
    for option in sorted(options, key=lambda option: (not option.flag, "device" not in option.words)):
        if not option.off and not any(argument.partition("=")[0] == option.name for argument in arguments):
            value = " cuda" if not option.flag and "device" in option.words else ""
            return f"does the script need its option {option.name}{value}?"
    return _PLAIN


def _sent_to_cpu(arguments: Sequence[str]) -> str:
    """The argument that says ``cpu``, such as ``--device cpu`` or ``trainer.device=cpu``; empty where none does."""
    for argument, following in zip_longest(arguments, arguments[1:]):
        if _SAYS_DEVICE.fullmatch(argument.removesuffix("=cpu")):
            if argument.endswith("=cpu"):
                return argument
            if following == "cpu":
                return f"{argument} cpu"
    return ""


def _files(script: str) -> Iterator[Path]:
    """The script, and the modules that it has imported from its own folder."""
    yield Path(script)
    folder = Path(script).absolute().parent
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and file != script and "site-packages" not in file:
            path = Path(file).absolute()
            if folder in path.parents:
                yield path


def _options(file: Path) -> Iterator[_Option]:
    """The options for a device that the code in ``file`` declares, by a call that is given their names."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for text in _texts(node.args):
                option = _Option(name=text.partition("/")[0], flag=_is_flag(node, text))
                if text.startswith("--") and option.words & _DEVICE and option.words <= _DEVICE | _BESIDE:
                    yield option


def _texts(nodes: Iterable[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_flag(call: ast.Call, text: str) -> bool:
    """Whether argparse or click would take the option that ``call`` declares without a value."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    is_flag = given.get("is_flag")
    return (
        "/" in text
        or any(action in _FLAGS for action in _texts([given["action"]] if "action" in given else []))
        or (isinstance(is_flag, ast.Constant) and is_flag.value is True)
    )
