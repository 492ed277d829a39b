"""How soon derived stores have what a database has, and how much they take.

- `stores`: the stores, each on an empty place of its own; `feeding`: a sink's query, its commits
  noted; `writer`: steady changes in a database, from a process of its own.
"""
