"""What users and we test with: a broker in a fixture, faults on demand, foreign Kafka code.

May import every other room; no other room but the command line may import this one.
"""
