"""The driver that the kill tests kill: a stream from a topic to two, exactly once, until the end.

It is its own supervisor for what fails inside: a query that ends is started again. What kills the
process itself is the business of whoever started it; it ends when its standard input does.
"""

from __future__ import annotations

import os
import sys
import threading

from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import reading, session
from penstock.spark.archive import MODE_VARIABLE
from penstock.spark.sink import ExactlyOnce
from penstock.spark.sink.exactly_once import DRIVER_BYTES

SCHEMA = "id BIGINT NOT NULL, word STRING"


def end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main(bootstrap: str, source: str, target: str, dead: str, folder: str, way: str) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ.setdefault(MODE_VARIABLE, "use")
    spark = session(
        name="kills",
        # A task that fails is run again by Spark, as on a cluster.
        master="local[2,3]",
        **{
            "spark.driver.memory": "768m",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": 2,
            "spark.local.dir": f"{folder}/spark",
            "spark.ui.enabled": False,
        },
    )
    rows = reading.json(
        spark.readStream.format("penstock")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", 200)
        .load(),
        SCHEMA,
    )
    value = F.to_json(F.struct((F.col("id") * 2).alias("twice"), F.upper("word").alias("word")))
    routed = reading.routed(rows, topic=target, value=value, dead_letter_topic=dead)
    # Batches are small: the driver sends them, or it leaves that to tasks.
    ways = {"driver": DRIVER_BYTES, "tasks": 0}
    while True:
        sink = ExactlyOnce(
            target,
            bootstrap,
            options={"kafka.delivery.timeout.ms": "20000"},
            driver_bytes=ways[way],
        )
        query = (
            routed.writeStream.option("checkpointLocation", f"{folder}/checkpoint")
            .foreachBatch(sink.write_batch)
            .start()
        )
        try:
            query.awaitTermination()
        except Exception as error:
            print(f"started again after {str(error)[:2000]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
