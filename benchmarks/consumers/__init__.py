"""Consumers side by side: groups, committed offsets, transactions and queues.

`make bench-consumers` runs it. Kafka and Penstock are driven by the same client (confluent-kafka,
which is librdkafka in C below its Python), RabbitMQ by a C client.
"""
