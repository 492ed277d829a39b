"""The driver that the kill test kills: flows that keep state, run as `penstock run` does."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from penstock.spark import session
from penstock.spark.archive import MODE_VARIABLE
from penstock.spark.flows import prepared
from penstock.spark.flows.declare import Collected
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.manager import Manager
from penstock.spark.flows.overseeing import Settings
from tests.spark.interpreted import INTERPRETED
from tests.spark.state.counting import counting, naming


def end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main(
    bootstrap: str, rows: str, names: str, counts: str, named: str, most: str, folder: str
) -> None:
    """`most` records are read over a plan that is prepared, more by stages."""
    prepared.PREPARED_RECORDS = int(most)  # type: ignore[misc]
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.setdefault(MODE_VARIABLE, "use")
    spark = session(
        name="state-kills",
        master="local[2]",
        **{
            "spark.driver.memory": "768m",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": 2,
            "spark.local.dir": f"{folder}/spark",
            "spark.ui.enabled": False,
            **INTERPRETED,
        },
    )
    flows = Collected.of([counting(rows, counts, batch=40), naming(rows, names, named, batch=40)])
    manager = Manager(spark, flows, Folder(Path(folder) / "data"), Settings(bootstrap))
    manager.start()
    manager.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
