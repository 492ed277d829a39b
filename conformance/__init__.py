"""Scenarios that run unchanged on the embedded broker and on a real Apache Kafka.

`scenarios/` has a module for each area: scenarios that use clients, and in `scenarios/protocol/`
those that send single requests. `failover.py` has the work that goes on while a node dies,
`differences.py` what differs on purpose. `kafka/` holds the foreign half: Apache Kafka's jars by
coordinates, and its Java client as a program that tests drive (`penstock.testing.kafka_tools`).
"""
