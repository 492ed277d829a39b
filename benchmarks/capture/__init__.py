"""`make bench-capture`: our capture beside Debezium's embedded engine, on the same databases.

Debezium's engine hands its events to a program that counts them and throws them away; ours writes
them into a log, durably and in transactions, on the same two cores. So what is compared is less
work on Debezium's side.
"""
