"""The `penstock` command.

`main` puts the commands together and turns errors into messages; each command has a file of its
own (`up`, `topics`, `produce`, `consume`, `log`). Commands that talk to a broker do so through
confluent-kafka alone, so they work the same on Apache Kafka.

A command imports what it needs when it runs: `penstock --help` and `penstock up` must not wait
for libraries that they do not use.
"""
