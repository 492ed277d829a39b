"""Compaction round by round: who is due, one pass at a time, then the swap.

The pass itself runs elsewhere (`compactor`) and takes as long as it takes; reads, writes and
retention go on. Only the swap at its end holds the partition's lock. If segments that were
compacted are gone by then, the outputs are thrown away and the next round begins anew.
"""

from __future__ import annotations

import logging
from functools import partial

from penstock.broker.upkeep.care import Care, Workshop
from penstock.broker.upkeep.compactor import Compactor
from penstock.log.cleaner import Cleaner, Due
from penstock.log.compaction import Result
from penstock.log.swap import Swap, remove_cleaned

log = logging.getLogger(__name__)


class CompactionRounds:
    """Keeps compacted topics compact."""

    def __init__(self, workshop: Workshop, compactor: Compactor, max_keys: int) -> None:
        self._workshop = workshop
        self._compactor = compactor
        self._max_keys = max_keys

    async def round(self) -> None:
        """Compact what is due, the dirtiest first."""
        due: list[tuple[float, Care]] = []
        for care in await self._workshop.partitions():
            await self._workshop.breathe()
            with self._workshop.guard("compacting", care.partition, care.compaction, final=False):
                found = self._due(care)
                if found is not None:
                    due.append((found.ratio, care))
        due.sort(key=lambda item: item[0], reverse=True)
        for _, care in due:
            with self._workshop.guard("compacting", care.partition, care.compaction):
                # Others took their time: what is due may have changed.
                found = self._due(care)
                if found is not None:
                    await self._compact(care, found)

    def _due(self, care: Care) -> Due | None:
        partition, now_ms = care.partition, self._workshop.now_ms()
        wanted = partition.config.compacted and not partition.gone and partition.failure is None
        if not wanted or care.unfinished_swap is not None or not care.compaction.ready(now_ms):
            return None
        if care.cleaner is None:
            care.cleaner = Cleaner(partition)
        return care.cleaner.due(now_ms, self._max_keys)

    async def _compact(self, care: Care, due: Due) -> None:
        partition = care.partition
        result = await self._compactor.run(partition.disk, partition.folder, due.job)
        async with care.lock:
            await self._workshop.whole(self._take_in(care, result))
        counters = self._workshop.counters
        counters.compactions += 1
        counters.records_compacted += result.records_read
        counters.records_removed += result.records_read - result.records_kept
        log.info(
            "%s is compact up to %d: %d of %d records stay, %d of %d bytes",
            partition.id, result.clean_until, result.records_kept, result.records_read,
            result.bytes_written, result.bytes_read,
        )  # fmt: skip

    async def _take_in(self, care: Care, result: Result) -> None:
        partition = care.partition
        swap = Swap(partition, result.replacements)
        if not swap.valid:
            if not partition.gone:
                discard = partial(remove_cleaned, partition.disk, partition.folder)
                await self._workshop.on_thread(discard)
            return
        if result.replacements:
            await self._workshop.on_thread(swap.prepare)
            swap.load_indexes()
            care.unfinished_swap = swap, result
        await finish_swap(self._workshop, care, result)


async def finish_swap(workshop: Workshop, care: Care, result: Result | None = None) -> None:
    """Carry out a swap, for the first time or again; the caller holds the partition's lock."""
    if care.unfinished_swap is not None:
        swap, result = care.unfinished_swap
        await workshop.on_thread(swap.run)
        swap.finish()
        care.unfinished_swap = None
        await workshop.on_thread(swap.let_go)
    if result is not None and care.cleaner is not None:
        care.cleaner.finish(result)
        await workshop.on_thread(care.cleaner.save)
