"""Groups of consumers: who reads which partition, and how far they have come.

One name belongs to one group, whatever its kind: *classic* (members agree among themselves on who
reads what), *consumer* (the broker assigns, KIP-848) or *share* (a queue, KIP-932). Each kind is a
state machine in a module of its own; `coordinator` holds them all, with the committed offsets.
Nothing here knows of sockets, disk or clock.
"""
