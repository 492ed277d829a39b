"""Joins: streams with streams within a time (`within`), events with tables (`enrich`)."""
