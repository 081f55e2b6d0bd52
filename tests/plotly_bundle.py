"""Fetches plotly.js's basic bundle, which every page carries, and its licence, from npm into the package.

Run it when constraints.txt gets another plotly, with no version to take the one that the installed plotly has:
``python tests/plotly_bundle.py [VERSION]``. The bundle is kept as it was published; npm checks it against its registry.
"""

import gzip
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from plotly.offline import get_plotlyjs_version

from ampmem.reporters.html import plotlyjs

PACKAGE = "plotly.js-basic-dist-min"
SCRIPT = "package/plotly-basic.min.js"
LICENCE = "package/LICENSE"
OPTIONS = ("--silent", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=30000")


def published(version: str) -> tuple[bytes, bytes]:
    """The script and the licence of ``version``. Raises ``CalledProcessError`` when npm cannot get them."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", *OPTIONS, f"{PACKAGE}@{version}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as members:
            return _content(members, SCRIPT), _content(members, LICENCE)


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, name
    return file.read()


def main() -> None:
    """Write both files and say what they are."""
    version = sys.argv[1] if len(sys.argv) > 1 else get_plotlyjs_version()
    script, licence = published(version)
    plotlyjs.BUNDLE.write_bytes(gzip.compress(script, compresslevel=9, mtime=0))
    (plotlyjs.FOLDER / "LICENSE").write_bytes(licence)
    print(f"{plotlyjs.BUNDLE.name}: {PACKAGE} {version}, {len(script):,} bytes, {len(plotlyjs.packed()):,} in gzip")


if __name__ == "__main__":
    main()
