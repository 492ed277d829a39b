"""What the first start would do while somebody waits for results, done beforehand and once.

    python -m tools.warm

All kernels are compiled, since numba does that when their modules are first imported; and the class
archive of Spark is made, which otherwise is made beside the first session.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Final

from penstock.spark.archive import make

SOURCE: Final = Path(__file__).resolve().parents[1] / "src"
_KERNEL: Final = re.compile(r"^@kernel\(", re.MULTILINE)


def compiled_modules() -> list[str]:
    """The modules that have kernels."""
    return sorted(
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("*.py")
        if _KERNEL.search(path.read_text(encoding="utf-8"))
    )


def main() -> None:
    for name in compiled_modules():
        import_module(name)
    make()


if __name__ == "__main__":
    main()
