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

- `checksums`: rows to numbers, ranges of them; `origins`: what is compared with: a table of a
  captured database, or what a topic says; `lapsing`: stores whose rows live for a while; `engine`:
  the rounds; `report`: what came out.
"""

from __future__ import annotations

from penstock.cli.verifying.engine import verify
from penstock.cli.verifying.report import Difference, Progress, Report, VerifyError

__all__ = ["Difference", "Progress", "Report", "VerifyError", "verify"]
