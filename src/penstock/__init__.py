"""Penstock: a durable, replayable log that speaks the Kafka protocol, and what feeds on it."""

__version__ = "0.1.0.dev0"
