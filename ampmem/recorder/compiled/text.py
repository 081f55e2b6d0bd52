"""Reads the Python text that Inductor generates for a compiled graph: what each of its allocations holds.

A line of the text allocates a buffer, another one calls the kernel that fills it, and the kernel's comment has the
nodes of which it was made: their names in dynamo's graph ("Source Nodes"), their ATen ops, and the fragment of AOT's
graph. Kernels in C++ have no such comment. Written for the texts of torch 2.11 to 2.15; a line that is not understood
says nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ampmem.names import shape_text

_COMMENT = re.compile(r"# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]")
_MAPPED = re.compile(r"#   (\S+) => (.+)")
_NODE = re.compile(
    r'#   %(\w+) : (?:Tensor "(\w+)\[(.*?)\]\[(.*?)\]\S*")?.*?= (PlaceHolder|call_function\[target=(\S+)\])'
)
_CAST = re.compile(r"\(%(\w+), torch\.(bfloat16|float16)\)")
_RETURNED = re.compile(r"%(\w+)")
_KERNEL = re.compile(r"(\w+) = async_compile\.\w+\((.*)")
_SIGNATURE = re.compile(r"def (triton_\w*)\((.*?)\):")
_ALLOCATED = re.compile(r"(\w+) = empty_strided\w*\((\(.*?\)), (\(.*?\)),.*?torch\.(\w+)\b")
_TAKEN = re.compile(r"(\w+) = (\w+)(?:; del \w+)?(?:  #.*)?$")
_VIEWED = re.compile(r"(\w+) = reinterpret_tensor\((\w+), (\(.*?\)), (\(.*?\)), ")
_SIZED = re.compile(r"assert_size_stride\((\w+), (\(.*?\)), ")
_ITEM = re.compile(r"(\w+) = (\w+)\[\d+\]$")
_RUN = re.compile(r"(\w+)(?:\.run)?\((.*)\)$")
_FILLED = re.compile(r"((?:extern_kernels|torch\.ops|aten)[\w.]*)\((.*), out=(?:reinterpret_tensor\()?(\w+)")
_MADE = re.compile(r"(\w+) = ((?:extern_kernels|torch\.ops|aten)[\w.]*)\((.*)\)$")
_NAME = re.compile(r"\b[a-z]\w*")
_NUMBER = re.compile(r"_\d+$")
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
    "b8": "bool",
}
_NARROW = ("at::BFloat16*", "at::Half*")
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}
_VIEWS = frozenset(
    ("view", "reshape", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "split", "clone")
)
"""ATen ops that only look at memory in another way, or copy it as it is."""


class TensorLayout(NamedTuple):
    """Type, shape and strides of a tensor; a symbolic size is ``None``."""

    dtype: str
    shape: tuple[int | None, ...]
    strides: tuple[int | None, ...]

    @property
    def bytes(self) -> int | None:
        """The bytes of its storage; ``None`` if unknown."""
        last = 0
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size is None or stride is None:
                return None
            last += (size - 1) * stride
        return 0 if 0 in self.shape else (1 + last) * _BYTES.get(self.dtype, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferContents:
    """What a buffer holds. ``sources`` are nodes of dynamo's graph, the likeliest first.

    ``op`` is the ATen op that made it (``aten::mm``), ``cast`` the argument of which it is only a copy in 16 bit,
    ``reads`` are the names of which it was made, and ``gradient`` is the index of the forward's argument whose gradient
    it is, or goes into alone.
    """

    op: str = ""
    sources: tuple[str, ...] = ()
    layout: TensorLayout | None = None
    cast: str = ""
    reads: tuple[str, ...] = ()
    gradient: int | None = None
    known: bool = True
    """Whether a comment says of which nodes it was made."""
    others: tuple[BufferContents, ...] = ()
    """The copies in 16 bit that the same memory holds at other times."""

    @property
    def dtype(self) -> str:
        return "" if self.layout is None else self.layout.dtype

    @property
    def shape(self) -> str:
        return "" if self.layout is None else shape_text(self.layout.shape)


@dataclass(slots=True)
class _Kernel:
    """What a kernel's comment and signature say; ``results`` are the positions of the arguments that it fills."""

    sources: list[str] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)
    source_of: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, list[TensorLayout]] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    returned: list[str] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """The positions of what a template, such as that of flex attention, reads, or fills if nothing is in it yet."""
    types: list[str] = field(default_factory=list)
    """The types of a C++ kernel's arguments."""
    arguments: dict[str, list[str]] = field(default_factory=dict)
    cast: str = ""
    """The node that is a copy in 16 bit."""

    @property
    def several(self) -> str:
        """The node that returns several tensors, of which the kernel's comment has only the names."""
        return next((node for node in self.targets if node not in self.layouts), "")

    @property
    def casts(self) -> bool:
        """Whether it only copies one tensor to 16 bit."""
        return [node for node, target in self.targets.items() if _short(target) not in _VIEWS] == [self.cast]


class Text:
    """What the ``source`` of a compiled graph says."""

    def __init__(self, source: str) -> None:
        kind = re.search(r"AOT ID: \['\d+_(\w+)'\]", source)
        self.backward = kind is not None and kind[1] == "backward"
        self.trains = kind is not None and kind[1] == "forward"
        """Whether it is a forward that has a backward."""
        self.in_cpp = "cpp_wrapper_src" in source
        """Whether it allocates in C++, of which nothing is read."""
        self.inputs: tuple[str, ...] = ()
        """The names of the graph's arguments, in order."""
        self.returned: tuple[str, ...] = ()
        """The names of its results; empty for ``None`` and numbers."""
        self.allocations: list[tuple[int, int | None]] = []
        """The line of each allocation by the text itself, in order, and its bytes if they are known."""
        self.source_of: dict[str, str] = {}
        """Node of dynamo's graph for each node of AOT's graph that a comment names."""
        self._values: dict[str, BufferContents] = {}
        self._layouts: dict[str, TensorLayout] = {}
        self._begins: dict[str, str] = {}
        """The name under which the memory of a name was allocated."""
        self._shapes: dict[str, tuple[int | None, ...]] = {}
        """The shapes of arguments."""
        self._before: dict[str, str] = {}
        """The name that the memory of a name had before."""
        self._lines: dict[int, str] = {}
        self._steps: list[tuple[tuple[str, ...], tuple[str, ...], str]] = []
        """What each statement reads and fills, and the op that reads it."""
        self._scratch: dict[int, BufferContents] = {}
        """What kernels called at a line allocate for themselves."""
        self._filled: dict[int, str] = {}
        """The first buffer that the kernel called at a line fills."""
        self._kernels: dict[str, _Kernel] = {}
        self.own: dict[int, list[str]] = {}
        """The nodes of AOT's own that a call at a line of backward computes, if a comment says of which nodes it is."""
        self._read(source.splitlines())
        self._gradients = self._going_into_gradients() if self.backward else {}
        self._held_by = {begin: self._tensor_in(begin, names) for begin, names in self._names().items()}
        for line, name in self._filled.items():
            self._scratch[line] = replace(self._scratch[line], gradient=self._gradients.get(name))

    def at(self, line: int) -> BufferContents | None:
        """What the memory allocated at ``line`` holds: what the graph returns in it, or else what it held first."""
        return self._held_by.get(self._lines.get(line, "")) or self._scratch.get(line)

    def of(self, name: str) -> BufferContents | None:
        """What the buffer ``name`` holds, whatever its memory holds at other times."""
        return self._values.get(name)

    @property
    def casts(self) -> list[str]:
        """The arguments of which the graph makes a copy in 16 bit, with repetitions."""
        return [value.cast for value in self._values.values() if value.cast]

    @property
    def understood(self) -> bool:
        """Whether comments say of which nodes every buffer was made."""
        return all(held.known for held in self._held_by.values())

    def reader(self, name: str) -> str:
        """The op for whose gradient the argument ``name`` is read first; empty if it is not read."""
        found = next((op for reads, _, op in self._steps if name in reads), "")
        return found.removesuffix("_backward").removesuffix("_dense")  # of embedding_dense_backward

    def _read(self, lines: Sequence[str]) -> None:
        kernel, comment, function, last = _Kernel(), None, "", _Kernel()
        for number, line in enumerate(lines, 1):
            if line.startswith("#"):
                if found := _COMMENT.match(line):
                    kernel = _Kernel(_items_of_list(found[1]), _items_of_list(found[2]))
                else:
                    _read_comment(kernel, line)
            elif found := _KERNEL.match(line):
                last = self._kernels[found[1]] = kernel
                last.types = _types(found[2])
                last.results = [at for at, kind in enumerate(last.types) if not kind.startswith("const")]
                self.source_of |= kernel.source_of
                kernel = _Kernel()
            elif found := _SIGNATURE.match(line):
                names = [name.strip() for name in found[2].split(",")]
                last.results = [at for at, name in enumerate(names) if name.startswith(("out_ptr", "in_out_ptr"))]
                last.given = [at for at, name in enumerate(names) if name.startswith("arg_")]
            elif found := re.match(r"\s*def (call|partition_\d+|\w+)\(", line):
                function = found[1]
            elif function == "call" or function.startswith("partition_"):
                statement = line.strip()
                if statement.startswith("#"):
                    comment = _COMMENT.match(statement) or comment
                elif self._statement(number, statement, comment, outermost=function == "call"):
                    comment = None

    def _statement(self, number: int, text: str, comment: re.Match[str] | None, *, outermost: bool) -> bool:
        """Read one statement of the graph; returns whether it computes something."""
        if found := _ALLOCATED.match(text):
            name, layout = found[1], TensorLayout(found[4], _sizes(found[2]), _sizes(found[3]))
            self._layouts[name], self._lines[number] = layout, name
            self.allocations.append((number, layout.bytes))
        elif found := _VIEWED.match(text):
            self._reuse_memory(found[1], found[2])
            if found[2] in self._layouts:
                dtype = self._layouts[found[2]].dtype
                self._layouts[found[1]] = TensorLayout(dtype, _sizes(found[3]), _sizes(found[4]))
        elif found := _SIZED.match(text):
            self._shapes[found[1]] = _sizes(found[2])
        elif found := _ITEM.match(text):
            self._reuse_memory(found[1], found[2])
            self._steps.append(((found[2],), (found[1],), ""))
            if found[2] in self._values:
                self._values[found[1]] = self._values[found[2]]
        elif text.endswith(" = args"):
            names = tuple(name.strip() for name in text.removesuffix(" = args").split(",") if name.strip())
            self.inputs = names if outermost or not self.inputs else self.inputs
        elif (found := _TAKEN.match(text)) and found[2] != "args":
            self._reuse_memory(found[1], found[2])
            if found[2] in self._layouts:
                self._layouts[found[1]] = self._layouts[found[2]]
        elif text.startswith("return (") and outermost:
            self.returned = tuple(_first_name(item) for item in _items(text[8:-1]))
        elif found := _FILLED.match(text):
            self._fill(number, [found[3]], _names(found[2]), _Kernel(), comment)
            return True
        elif found := _MADE.match(text):
            self._lines[number] = found[1]
            self._fill(number, [found[1]], _names(found[3]), _Kernel(), comment)
            return True
        elif (found := _RUN.match(text)) and (kernel := self._kernels.get(found[1])) is not None:
            arguments = [_first_name(item) for item in _items(found[2])]
            filled = [arguments[at] for at in kernel.results if at < len(arguments) and arguments[at]]
            given = [arguments[at] for at in kernel.given if at < len(arguments)]
            filled += [name for name in given if name in self._layouts and name not in self._values]
            reads = tuple(name for name in arguments if name and name not in filled)
            reads += tuple(self._before[name] for name in filled if self._before.get(name) in self._values)
            self._fill(number, filled, reads, kernel, comment)
            for name, cast in self._copies(arguments, kernel).items():
                self._values[name] = replace(self._values[name], cast=cast)
            return True
        return False

    def _reuse_memory(self, name: str, before: str) -> None:
        """Note that ``name`` is in the memory of ``before``."""
        self._begins[name] = self._begins.get(before, before)
        self._before[name] = before

    def _fill(
        self,
        number: int,
        names: list[str],
        reads: tuple[str, ...],
        kernel: _Kernel,
        comment: re.Match[str] | None,
    ) -> None:
        """Note that ``kernel``, called at line ``number`` below ``comment``, fills the buffers ``names``."""
        sources, ops = map(_items_of_list, comment.groups()) if comment is not None else ([], [])
        whole = BufferContents(op=_op("", "", ops), sources=self._sources("", kernel, sources), reads=reads)
        if self.backward and comment is not None:
            named_after = set(map(_short, ops))  # AOT names a node after its op, dynamo after what the script calls
            self.own[number] = [source for source in sources if _NUMBER.sub("", source) in named_after]
        self._scratch[number] = whole
        self._filled[number] = names[0] if names else ""
        backward = [op for op in ops if op.endswith("_backward")] if kernel.targets else []
        self._steps.append((reads, tuple(names), _op("", "", backward) or whole.op))
        arguments = [name for name in reads if name not in self._values]
        cast = arguments[0] if kernel.casts and len(arguments) == len(names) == 1 else ""
        for name, node in zip(names, self._nodes(names, kernel), strict=True):
            self._values[name] = BufferContents(
                op=_op(kernel.targets.get(node, ""), kernel.source_of.get(node, ""), ops),
                sources=self._sources(node, kernel, sources),
                layout=self._layouts.get(name),
                cast=cast,
                reads=reads,
                known=comment is not None,
            )

    def _sources(self, node: str, kernel: _Kernel, sources: list[str]) -> tuple[str, ...]:
        """The nodes of dynamo's graph that ``node`` comes from, the likeliest first."""
        # Equal kernels are one kernel, with the first call's comment: the others' nodes stand in the same places.
        named = dict(zip(kernel.sources, sources, strict=False)) if len(kernel.sources) == len(sources) else {}
        if self.backward:  # a node that is its own source is backward's; others are computed again
            sources = [named[each] for each in kernel.sources if each in named and kernel.source_of.get(each) != each]
        likely = [named.get(kernel.source_of.get(each, ""), "") for each in (node, *kernel.arguments.get(node, ()))]
        return tuple(dict.fromkeys(each for each in (*likely, *reversed(sources)) if each in sources))

    def _copies(self, arguments: Sequence[str], kernel: _Kernel) -> dict[str, str]:
        """The results of a C++ kernel that are copies in 16 bit of an argument: the only ones of their shape."""
        wide: dict[object, list[str]] = {}
        narrow: dict[object, list[str]] = {}
        for name, kind in zip(arguments, kernel.types, strict=False):
            if kind == "const float*" and name in self._shapes:
                wide.setdefault(frozenset(Counter(self._shapes[name]).items()), []).append(name)
            elif kind in _NARROW and name in self._layouts:
                narrow.setdefault(frozenset(Counter(self._layouts[name].shape).items()), []).append(name)
        alone = [shape for shape, names in narrow.items() if len(names) == 1 and len(wide.get(shape, ())) == 1]
        return {narrow[shape][0]: wide[shape][0] for shape in alone}

    def _nodes(self, names: Sequence[str], kernel: _Kernel) -> list[str]:
        """The node that each of the buffers ``names`` holds, empty where it is not certain.

        The kernel's comment has them in the order of the buffers' numbers, with those that it needs for itself.
        """
        left = list(kernel.returned)
        found = dict.fromkeys(names, "")
        for name in sorted(names, key=lambda name: (len(name), name)):
            layout = self._layouts.get(name)
            like = [node for node in left if layout in kernel.layouts.get(node, ())]
            if like:
                found[name] = kernel.several if like[0] not in kernel.targets else like[0]
                del left[: left.index(like[0]) + 1]
        return list(found.values())

    def _names(self) -> Mapping[str, list[str]]:
        """The names of each allocation, in order."""
        names: dict[str, list[str]] = {name: [name] for name in self._lines.values()}
        for name, begin in self._begins.items():
            names.setdefault(begin, [begin]).append(name)
        return names

    def _tensor_in(self, begin: str, names: Sequence[str]) -> BufferContents:
        casts = tuple(self._values[name] for name in names if name in self._values and self._values[name].cast)
        kept = [name for name in names if name in self.returned and name in self._values]
        first = [name for name in names if name in self._values]
        chosen = [*reversed(kept), *first, begin][0]
        held = self._values.get(chosen, BufferContents(layout=self._layouts.get(chosen), known=False))
        layout = self._layouts.get(begin) if held.layout is None else held.layout
        others = tuple(each for each in casts if each is not held)
        return replace(held, layout=layout, gradient=self._gradients.get(chosen), others=others)

    def _going_into_gradients(self) -> dict[str, int]:
        """The index of the argument of forward into whose gradient each name goes alone."""
        found = {name: index for index, name in enumerate(self.returned) if name}
        for reads, filled, _ in reversed(self._steps):
            goals = {found.get(name, -1) for name in filled}
            goal = goals.pop() if len(goals) == 1 else -1
            for name in reads:
                if name not in self.returned:
                    found[name] = goal if found.get(name, goal) == goal else -1
        return {name: index for name, index in found.items() if index >= 0}


def _read_comment(kernel: _Kernel, line: str) -> None:
    """Add what a line of the comment above a kernel says."""
    if found := _MAPPED.match(line):
        kernel.source_of |= dict.fromkeys(found[2].split(", "), found[1])
    elif found := _NODE.match(line):
        name, dtype, shape, strides, _, target = found.groups()
        if dtype is not None:
            layout = TensorLayout(_DTYPES.get(dtype, dtype), _sizes(shape), _sizes(strides))
            kernel.layouts.setdefault(name, []).append(layout)
        if target is not None:
            kernel.targets[name] = target
            kernel.arguments[name] = _RETURNED.findall(line.partition("](args = ")[2])
            if "convert_element_type" in target and _CAST.search(line):
                kernel.cast = name
    elif line.startswith("#   return "):
        kernel.returned = _RETURNED.findall(line)


def _op(target: str, source: str, ops: Sequence[str]) -> str:
    """The ATen op of a node, as eager code calls it: that node's own one, or the one that it is a part of."""
    own = _short(target)
    names = [_short(op) for op in ops]
    if own == "convert_element_type" and "_to_copy" in names:
        own = "_to_copy"
    if own and own not in names:
        wanted = _NUMBER.sub("", source)
        own = next((name for name in names if wanted and wanted in name), own)
    if not own:
        own = next((name for name in reversed(names) if name not in _VIEWS), names[-1] if names else "")
    return f"aten::{own}" if own else ""


def _short(op: str) -> str:
    """``native_layer_norm`` of ``torch.ops.aten.native_layer_norm.default``."""
    parts = op.removeprefix("torch.ops.").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _types(text: str) -> list[str]:
    """The types in a C++ kernel's signature."""
    return re.findall(r"'([^']*\*)'", text.partition("]")[0]) if text.startswith("[") else []


def _items_of_list(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _sizes(text: str) -> tuple[int | None, ...]:
    parts = [each.strip() for each in text.strip("()").split(",") if each.strip()]
    return tuple(int(each) if each.isdigit() else None for each in parts)


def _items(text: str) -> Iterator[str]:
    """The items of a list of arguments."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if text[start:].strip():
        yield text[start:].strip()


_NO_NAME = re.compile(r"aten|torch|[su]\d+$|ks\d+$")
"""Constants, and the sizes of a dynamic shape."""


def _first_name(text: str) -> str:
    """The buffer or argument in an expression; empty for a keyword, a number or ``None``."""
    text = text.removeprefix("reinterpret_tensor(")
    found = _NAME.match(text)
    return found[0] if found and "=" not in text and not _NO_NAME.match(found[0]) else ""


def _names(text: str) -> tuple[str, ...]:
    """The buffers and arguments in the arguments of a call."""
    return tuple(name for item in _items(text) if (name := _first_name(item)))
