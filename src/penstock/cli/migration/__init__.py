"""The engine of `penstock migrate`: topics, records and group offsets from one cluster to another.

Both ends are spoken to in the Kafka protocol; either may be Penstock's broker or Apache Kafka.

**Exactly once.** Records are written to the target by a transactional producer. The same
transaction carries the position reached in the source, as offsets of a migration group on the
target (`state.py`), and the map from source offsets to target offsets (`mapping.py`). So whatever
is there of one is there of all, a kill at any moment leaves nothing half done, and the next run
goes on behind what was committed. A second run at the same time fences the first.

**In order.** One consumer reads the committed records of all partitions; each goes to the partition
of the same number. Aborted records and markers are left behind, so offsets differ; that is what
the map is for.

**Held still.** While it is being filled, a topic of the target keeps everything and takes every
timestamp (`plan.HOLD`). Its own settings come into force at the end, after verification.

**Verified.** The position also carries how many records have been copied since the last
verification, and a digest over them in their order. Both sides are read again, the target to its
end: at the end of a run, and in one that follows whenever there is much to compare.

**Alone.** Records of others in the target end the migration; each run looks for them before it does
anything. Group offsets are never moved over them, nor away from what a group has committed itself.
"""
