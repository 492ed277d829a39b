"""SQLite -> log: triggers write what changes into a changelog beside the data, the source reads it.

There is no server and no log to read: `setup` puts three triggers on each captured table. They
copy the old and the new values, as they are, into a changelog table; numbers stay numbers, BLOBs
stay BLOBs. Everything is named `_penstock_NAME__...`, and `remove` takes all of it away.

- `location`: the URL, and how the file is opened
- `tables`: what tables there are, and what their columns are in the stream
- `triggers`: the SQL of triggers and changelogs
- `catalog`: what is installed; what is done when the user alters, creates or drops tables
- `values`: values as fragments of JSON, by code that is generated for each table
- `reading`: rows of tables in the order of their key
- `snapshot`, `stream`, `watch`: tables at one moment; changes as they come; who wakes the stream

What users should know:

- *Transactions.* Triggers cannot see transactions. What became visible at once, at one look of the
  stream, is told as one transaction (up to 200,000 changes): a transaction is never told before it
  is committed, and several small ones may be told as one.
- *Keys.* The primary key, else the `rowid`, which is then told as a column. `VACUUM` may number the
  rows of such tables anew: the table is then told again, after a truncate event. SQLite allows
  several rows with NULL in their primary key; they cannot be told apart: say NOT NULL.
- *REPLACE.* `INSERT OR REPLACE` of a key is told as a create of the same key. Rows that it removes
  because of another UNIQUE constraint are told as deletes, though SQLite itself runs no trigger
  for them (not where the unique index is over expressions).
- *ALTER TABLE.* Columns that are added or renamed are seen at once: rows that were written before
  the triggers were made anew are read again and told as updates without a `before`. A table that
  is dropped and made anew (as migration tools do) is told again, after a truncate event.
  `DROP COLUMN` of a captured table is refused by SQLite as long as triggers name the column:
  `penstock capture alter NAME "ALTER TABLE ... DROP COLUMN ..."` (`SqliteSource.alter`) does it in
  one transaction with the triggers; or drop the triggers by hand in the same transaction: they
  come back by themselves, and the table is told again.
- *Values.* SQLite lets any column hold any value; each value is told as what it is. Integers and
  reals are numbers (reals with all their digits; infinities are the strings "Infinity" and
  "-Infinity"), text is a string (bytes in it that are not UTF-8 become U+FFFD), a BLOB is base64.
  The declared type decides only the schema: INTEGER and BOOLEAN are int64, REAL and DECIMAL double,
  TEXT, DATE and no type at all string, BLOB bytes.
- *Old libraries.* The triggers run inside of the user's programs and use nothing newer than
  SQLite 3.8; the capture itself needs SQLite 3.37.
"""
