"""From a source into the log: positions, snapshots, control, and what is told of it all.

`Capture` (in `capture`) runs one; `CaptureConfig` (in `config`) is what stands in `[capture.NAME]`
of a penstock.toml. From another process `control` tells of captures and talks to them, through the
log and nothing else.
"""
