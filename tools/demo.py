"""`penstock demo` as `make run` runs it: `python -m tools.demo`.

Ctrl-C before the demo has begun ends the command with 130, of which make says "Error 130" although
all is well. Here that is no error. The process stays the same, so that it gets what make is told.
"""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run it; whatever else it ends with stays as it is."""
    try:
        from penstock.cli.main import main as penstock

        sys.argv = ["penstock", "demo", *sys.argv[1:]]
        penstock()
    except KeyboardInterrupt:
        return
    except SystemExit as ended:
        if ended.code != INTERRUPTED:
            raise


if __name__ == "__main__":
    main()
