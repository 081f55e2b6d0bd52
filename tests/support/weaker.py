"""``ampmem`` on a machine whose kernel offers less to protect files with.

    python weaker.py user|landlock|python COMMAND...

With ``user`` overlays need a user namespace even for root, with ``landlock`` there are none, and with ``python`` there
is no Landlock either.
"""

import errno
import sys

from ampmem.cli.main import main
from ampmem.cli.processes import kernel

overlay_everything = kernel.overlay_everything


def refused(*_, **__):
    raise OSError(errno.EPERM, "not on this machine")


def as_user(folders, limit, *, as_root):
    return refused() if as_root else overlay_everything(folders, limit, as_root=False)


if __name__ == "__main__":
    way = sys.argv.pop(1)
    kernel.overlay_everything = as_user if way == "user" else refused
    if way == "python":
        kernel.landlock = refused
    main()
