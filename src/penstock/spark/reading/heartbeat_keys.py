"""The keys of heartbeats, each as a converter of Kafka Connect reads it.

A heartbeat is a record without a value in a topic of others, such as the change events of a table.
Who reads those with one converter must be able to read its key as well: JsonConverter wants JSON,
with `schemas.enable` an object of `schema` and `payload` (which the other takes too); AvroConverter
wants the id of a schema before the data. The Avro key has the id that captures give to the schema
`"string"`: they take ids from the schemas' own texts.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import orjson

from penstock.client.table_schemas import AVRO_SCHEMA, SchemaRecord

NAME: Final = "penstock.heartbeat"
_SCHEMA: Final = '"string"'
_ID: Final = int.from_bytes(hashlib.sha256(_SCHEMA.encode()).digest()[:4], "big") & 0x7FFFFFFF

HEARTBEAT: Final = orjson.dumps({"schema": {"type": "string", "optional": False}, "payload": NAME})
# The length of a text is written twice as large, since its sign is the last bit.
AVRO_HEARTBEAT: Final = struct.pack(">bIB", 0, _ID, 2 * len(NAME)) + NAME.encode()
# The last is as heartbeats were before.
HEARTBEATS: Final = (HEARTBEAT, AVRO_HEARTBEAT, NAME.encode())


def schema_record() -> SchemaRecord:
    """What registers the schema of the Avro key in the topic of schemas."""
    return SchemaRecord(f"{NAME}-key", 1, _ID, _SCHEMA, AVRO_SCHEMA)
