"""What a cell does to names, as far as its code tells."""

import pytest

from ampmem.integrations.notebook.cells import names_of


@pytest.mark.parametrize(
    ("code", "binds", "needs", "reads"),
    [
        ("x = y", "x", "y", "y"),
        ("x = x + 1", "x", "x", "x"),
        ("x += 1", "x", "x", "x"),
        ("x = 1\nprint(x)", "x", "print", "print"),
        ("del x", "x", "x", "x"),
        ("for i in items:\n    last = i", "i last", "items", "items"),
        ("[i + k for i in items if i]", "", "items k", "items k"),
        ("[(last := i) for i in items]", "last", "items", "items"),
        ("with opened() as f:\n    f.read()", "f", "opened", "opened"),
        ("import torch.nn as nn, os.path", "nn os", "", ""),
        ("from torch import nn", "nn", "", ""),
        ("def f(a, b=c):\n    d = a + e\n    return d", "f", "c e", "c e"),
        ("def f():\n    return g()\ndef g():\n    return 1", "f g", "g", "g"),
        ("b = 8\ndef f():\n    return b", "b f", "", "b"),
        ("def f():\n    def g(b):\n        return b\n    return b", "f", "b", "b"),
        ("class A:\n    b = 1\n    def f(self):\n        return b", "A", "b", "b"),
        ("def f():\n    global b\n    b = 1", "f b", "", ""),
        ("g = lambda x: x * scale", "g", "scale", "scale"),
        ("class A(B):\n    def f(self):\n        return helper(self)", "A", "B helper", "B helper"),
        ("try:\n    go()\nexcept E as error:\n    print(error)", "error", "go E print", "go E print"),
        ("match x:\n    case [first, *rest]:\n        pass", "first rest", "x", "x"),
        ("x: int = y", "x", "y int", "y int"),
        ("model.half()", "", "model", "model"),
        ("a.b[0].c = d", "a", "a d", "a d"),
        ("if (n := f()):\n    print(n)", "n", "f print", "f print"),
        ("get_ipython().run_cell_magic('time', '', 'x = y\\n')", "x", "y", "y"),
    ],
)
def test_what_a_cell_binds_and_reads(code: str, binds: str, needs: str, reads: str) -> None:
    names = names_of(code)
    assert names.binds == set(binds.split())
    assert names.needs == set(needs.split())
    assert names.reads == set(reads.split())


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("model.half()", "model"),
        ("for i in range(3):\n    optimizer.step()", "optimizer"),
        ("nn.init.zeros_(model.weight)", "nn model"),
        ("loss = train(model)", "train model"),
        ("print(model, len(data))", ""),
        ("x = torch.randn(3)", ""),
        ("def f():\n    model.half()", ""),
    ],
)
def test_what_a_cell_may_change_in_place(code: str, changes: str) -> None:
    assert names_of(code).changes == set(changes.split())


@pytest.mark.parametrize(
    ("code", "hidden"),
    [
        ("exec('x = 1')", ("exec",)),
        ("globals()['x'] = 1", ("globals",)),
        ("get_ipython().run_line_magic('run', 'a.py')", ("%run",)),
        ("get_ipython().run_cell_magic('time', '', 'exec(\\'x = 1\\')')", ("exec",)),
        ("get_ipython().run_cell_magic('bash', '', 'ls')", ("%%bash",)),
        ("get_ipython().system('python a.py')", ("!python",)),
        ("get_ipython().run_line_magic('load_ext', 'ampmem')", ()),
        ("x = 1", ()),
    ],
)
def test_what_nobody_can_tell(code: str, hidden: tuple[str, ...]) -> None:
    assert names_of(code).hidden == hidden
