"""How far groups are behind, and how long until they lose records.

`formulas` says what lag is, in pure functions; `watch` measures it in the broker, from the
`positions` of all groups; `alerts` decides what is worth telling, and `webhook` tells it.
"""
