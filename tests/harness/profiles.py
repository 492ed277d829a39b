"""How much proof each command asks for: one table of budgets, a column per profile.

`make check` has the profile `check`, `make test` and a plain `pytest` have `test`, `make proof` has
`proof`. A budget says how often: kills, crash points, frames, rounds, examples of hypothesis. What
is tested is the same in every profile; a test that belongs to one profile alone is marked `proof`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, TypeVar

VARIABLE: Final = "PENSTOCK_PROFILE"
T = TypeVar("T")


class Profile(StrEnum):
    """The three commands."""

    CHECK = "check"
    TEST = "test"
    PROOF = "proof"


PROFILE: Final = Profile(os.environ.get(VARIABLE) or Profile.TEST)


def _of(check: T, test: T, proof: T) -> T:
    return {Profile.CHECK: check, Profile.TEST: test, Profile.PROOF: proof}[PROFILE]


def examples(test: int) -> int:
    """Examples of hypothesis: so many in `test`, a fifth of it in `check`, ten times in `proof`."""
    return _of(max(5, test // 5), test, test * 10)


def some(values: Sequence[T], *, test: int, check: int | None = None) -> list[T]:
    """The first few of a list of cases, and all of them in `proof`."""
    return list(values[: _of(test if check is None else check, test, len(values))])


# ---- the log and the broker ------------------------------------------------------------------
#                                          check    test      proof
# Simulated crashes of a machine, for each of six tests.
LOG_CRASHES: Final = _of(12, 60, 700)
# Of a damaged data directory: bytes changed in each file.
DAMAGED_BYTES: Final = _of(5, 20, 1_000_000)
# Of each file: how often it is cut or has something at its end.
CUT_FILES: Final = _of(4, 8, 100)
# Of each codec, batches that are damaged; of each message, damaged ones and places of a length.
DAMAGED_BATCHES: Final = _of(150, 500, 5_000)
DAMAGED_MESSAGES: Final = _of(10, 20, 200)
ABSURD_PLACES: Final = _of(60, 200, 1_000)
# Partitions of a broker that is stopped and started.
STOPPED_PARTITIONS: Final = _of(60, 150, 5_000)
# Writes and syncs that fail, each followed by a crash; at least one for each of fifty steps.
FAILED_WRITES: Final = _of(50, 100, 1_000)
RETENTION_LOGS: Final = _of(1, 3, 8)
# Simulated disks, each with a seed: those that test the simulation itself (a sixth of them is the
# least that shows all that a disk may do), and those under a part of the log.
DISKS: Final = _of(300, 300, 3_000)
FAILED_SYNC_DISKS: Final = _of(4, 10, 100)
UNSYNCED_NAME_DISKS: Final = _of(10, 30, 300)
CHECKPOINT_DISKS: Final = _of(70, 200, 2_000)
RESERVE_DISKS: Final = _of(36, 100, 1_000)
# Milliseconds between the times that are looked up in a server's archive.
S3_LOOKUP_STEP: Final = _of(45, 45, 7)
COMPACTION_LOGS: Final = _of(1, 1, 4)
# Hostile requests, one by one and as a stream.
FUZZ_FRAMES: Final = _of(1_000, 4_000, 92_000)
FUZZ_STREAMS: Final = _of(100, 400, 10_000)
FLIPPED_BITS: Final = _of(1, 2, 8)
# Records of eight producers each, 1.6 MB in all: a hundred times what the topic takes.
PUSHED_RECORDS: Final = _of(400, 400, 1_600)
BROKER_KILLS: Final = _of(1, 3, 10)
# Instances of a Kafka Streams application, each replaced by another.
STREAMS_KILLS: Final = _of(1, 1, 8)
BROKER_STOPS: Final = _of(1, 2, 3)
CHAOS_STEPS: Final = _of(60, 150, 400)
# Random writers, readers and restarts of a topic that waits for its groups, and steps of each.
GUARDED_RUNS: Final = _of(2, 4, 12)
GUARDED_STEPS: Final = _of(75, 150, 300)
# Logs that grow to their bound, and clients that wait for their quota.
BOUNDED_LOGS: Final = _of(10, 30, 300)
QUOTA_CLIENTS: Final = _of(7, 20, 200)
# Of each version of Produce: requests that are answered in two ways.
PRODUCE_ROUNDS: Final = _of(30, 100, 400)
# Groups that Apache Kafka's assignors divide.
ASSIGNED_GROUPS: Final = _of(40, 40, 400)
CONSUMER_FAULTS: Final = _of(2, 4, 7)
# Records that consumers read meanwhile: once and no more, by groups whose members change, of a
# queue, with slow readers, and with one that is held.
PIPELINE_RECORDS: Final = _of(300, 300, 900)
CHURN_RECORDS: Final = _of(600, 600, 1_800)
SHARED_RECORDS: Final = _of(400, 400, 1_200)
SLOW_RECORDS: Final = _of(200, 200, 600)
ZOMBIE_RECORDS: Final = _of(60, 60, 180)
QUEUE_RECORDS: Final = _of(200, 400, 1_000)
ORACLE_ROUNDS: Final = _of(1, 3, 8)
# Versions of each message that are compared with another implementation.
ORACLE_VERSIONS: Final = _of(3, 100, 100)
# Steps of a writer whose connections are cut.
WRITER_STEPS: Final = _of(60, 150, 600)
# Records of a writer whose broker dies three times meanwhile: thousands, by three.
WRITER_RECORDS: Final = _of(9_000, 15_000, 30_000)
# Records written while a node of three dies and comes back.
FAILOVER_RECORDS: Final = _of(1_800, 1_800, 6_000)

# ---- Spark -----------------------------------------------------------------------------------
#                                          check    test      proof
# Kills of the driver, of Python workers and of the broker, under a stream.
SPARK_KILLS: Final = _of(3, 4, 10)
RESIDENT_KILLS: Final = _of(1, 2, 30)
# Kills of a driver whose flows keep state, and rows for each.
STATE_KILLS: Final = _of(1, 1, 3)
STATE_KILL_ROWS: Final = _of(80, 80, 200)
# Points of a micro-batch at which a flow with state fails, one after the other.
STATE_FAILURE_POINTS: Final = _of(4, 4, 12)
# Of flows that one job computes: how many variants, rounds, rows and rests are compared.
ONE_JOB_VARIANTS: Final = _of(2, 2, 4)
ONE_JOB_ROUNDS: Final = _of(1, 1, 2)
ONE_JOB_TURNS: Final = _of(3, 3, 4)
ONE_JOB_SECONDS: Final = _of(30, 30, 60)
ONE_JOB_RESTS: Final = _of(2, 2, 3)
# Of rows that are packed, what happens to one attempt at a micro-batch after the other.
PACKED_ATTEMPTS: Final[tuple[str, ...]] = _of(
    ("before", "after"), ("before", "after"), ("none", "before", "between", "after")
)
# Of views in small micro-batches and large ones: micro-batches for each view.
VIEW_BATCHES: Final = _of(3, 3, 5)
# Records of a micro-batch, where a topic is read in several: the more, the fewer of them.
SOURCE_BATCH_RECORDS: Final = _of(700, 700, 150)
# Operators over random histories, cut at random.
OPERATOR_HISTORIES: Final = _of(20, 20, 60)
# Random documents, good and bad, for each schema.
JSON_DOCUMENTS: Final = _of(100, 200, 700)
NEXMARK_EVENTS: Final = _of(2_000, 2_000, 6_000)

# ---- capture, sinks, the command line --------------------------------------------------------
#                                          check    test      proof
# Kills of a capture while tables are truncated.
TRUNCATE_KILLS: Final = _of(2, 2, 6)
# Captures that are killed inside a truncate that a store follows.
FOLLOWED_KILLS: Final = _of(1, 1, 4)
# Snapshots of a table that is truncated meanwhile.
TRUNCATED_SNAPSHOTS: Final = _of(1, 1, 3)
# Snapshots of one table while others write to it.
LOADED_SNAPSHOTS: Final = _of(2, 2, 3)
# Of a random load on a table, how often what is rebuilt is held against it.
LOAD_ROUNDS: Final = _of(3, 3, 6)
# Crashes of a database server whose changes are read.
SERVER_CRASHES: Final = _of(1, 1, 4)
# Blocks of a changelog hold a so many times smaller share of what they hold in earnest.
BLOCK_SHARE: Final = _of(16, 16, 1)
# Kills of a process that writes to a store or opens it.
STORE_KILLS: Final = _of(1, 1, 3)
# Of the statements of an SQL store, one of so many is where it is killed.
STATEMENTS_PER_KILL: Final = _of(6, 6, 1)
# Batches of random changes for each store, and limits of ranges for each kind of key.
STORE_BATCHES: Final = _of(4, 5, 12)
STORE_LIMITS: Final = _of(1, 1, 8)
BUCKET_BATCHES: Final = _of(2, 2, 3)
# Random tables of ten columns of each kind of database, in every store, and their rows.
RANDOM_TABLES: Final = _of(1, 3, 40)
RANDOM_TABLE_ROWS: Final = _of(20, 20, 60)
# Of a business: the rows of its largest transaction, and of its table of every type.
BUSINESS_ROWS: Final = _of(2_000, 2_000, 100_000)
BUSINESS_TYPE_ROWS: Final = _of(20, 20, 400)
# Rows of a table that is compared with a store while somebody writes to it.
VERIFIED_ROWS: Final = _of(300, 600, 3_000)
# Kills of a migration, and Ctrl-C.
MIGRATION_KILLS: Final = _of(1, 1, 4)
MIGRATION_STOPS: Final = _of(1, 1, 4)

# ---- examples, documentation -----------------------------------------------------------------
#                                          check    test      proof
# The parts of the demo that are killed, one after the other.
DEMO_KILLS: Final = _of(1, 1, 4)

# ---- tests/proof, which `make proof` alone runs ----------------------------------------------
# The least time of each soak.
SOAK_MINUTES: Final = float(os.environ.get("PENSTOCK_SOAK_MINUTES") or 5)
# Of consumers: kills of the broker in all, records and faults of each round.
SOAK_KILLS: Final = 50
SOAK_RECORDS: Final = 3_000
SOAK_FAULTS: Final = 30
# A million frames, as threads of one process send them: rounds, and what each thread sends.
SOAK_FUZZ_ROUNDS: Final = 20
SOAK_FUZZ_FRAMES: Final = 46_000
SOAK_FUZZ_STREAMS: Final = 5_000
# Two hundred kills of a broker, and of a stream: on so many data directories, and in so many runs.
SOAK_DIRECTORIES: Final = 10
SOAK_DIRECTORY_KILLS: Final = 20
SOAK_SPARK_RUNS: Final = 10
SOAK_SPARK_KILLS: Final = 20
