"""Reads its own source and names, as tools for configuration do."""

import inspect
import linecache
import sys
from pathlib import Path

from _training import train_alone


def mine(number: int) -> int:
    return number + 1


train_alone(1)
print(inspect.getsource(mine), inspect.getmodule(mine) is sys.modules["__main__"], mine.__module__)
print(linecache.getline(__file__, 1), Path(sys.argv[0]).name, Path(inspect.getfile(mine)).name)
