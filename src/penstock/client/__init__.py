"""A small synchronous client of the Kafka protocol, for what librdkafka cannot do.

`connection` talks to one broker, and finds the right one of a cluster; `transactions` ends
transactions that other processes have begun. It works on Penstock's broker and on Apache Kafka,
as far as the broker knows what is asked.
"""
