"""What keeps the log within bounds while the broker runs.

`housekeeping` makes the rounds: upkeep of every partition, compaction (`compacting`, by the child
process of `compactor`) and the archive (`archiving`); `care` is what they know of each partition.
"""
