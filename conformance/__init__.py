"""Scenarios that run unchanged on the embedded broker and on a real Apache Kafka.

`kafka/` holds the foreign half: Apache Kafka's jars by coordinates, and its Java client as a
program that tests drive (`penstock.testing.kafka_tools`).
"""
