"""Whether a derived store holds what its source holds, found out while both change.

Both sides are read once, row by row, each row brought to the store's columns by the same code that
feeds the store. Of a row only two numbers are kept: the checksum of its key and that of all of it.
Checksums of ranges of keys are compared, and ranges that differ are halved until single keys are
left. (Keys are ordered by their checksum, since databases and stores sort texts in ways of their
own.)

Then comes what is difficult: the source was read at one moment, the store at a later one, and the
log has moved between them. The log itself tells which keys that concerns. Let

- `since` be the end of the topic before the source is read,
- `until` its end when the capture has written all that was committed before the source was read;
  the store is read only when it has reached this,
- `end` the end of the topic after the store was read.

The store's row of a key is then that of the source, unless a record of the key lies between `since`
and `end`. So a key that differs and has no record there differs for sure: it could not have been
read at a wrong moment. Keys that do have one are looked at again, only they, until they are equal
or quiet. A key that never is quiet counts as in step if the store has what the log has for it.

A query of the database is compared in the same way with what flows have made of the log. They
write what has come of a whole micro-batch, so the log need not have each value that the database
had: what differs is looked at several times, unless nothing was captured meanwhile.

- `sides`: what a user names, as two sides; `engine`: the rounds; `report`: what came out.
- `checksums`: rows to numbers, ranges of them; `values`: what values mean, where the types of both
  sides are not the same; `set_aside`: keys whose last record cannot be read; `lapsing`: stores
  whose rows live for a while.
- `origins`: what is compared with: a table of a captured database, or what a topic says; `query`:
  what the database answers, `databases`: how it is asked; `captured`, `flow_graph`: when captures
  and flows have come so far; `topic_rows`: a topic in the place of a store; `letters`: dead
  letters.
"""

from __future__ import annotations

from penstock.cli.verifying.report import Difference, Progress, Report, VerifyError
from penstock.cli.verifying.sides import verify

__all__ = ["Difference", "Progress", "Report", "VerifyError", "verify"]
