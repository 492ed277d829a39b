#!/bin/bash
# Makes the class archive with which Apache Kafka starts in half the time: a broker starts once, and
# Java writes down the classes that it has loaded. Java itself sees to it that an archive fits.
#
#   kafka-archive.sh .kafka
set -euo pipefail

home=$1
folder=$(mktemp -d)
broker=
end() {
    [ -z "$broker" ] || kill -KILL "$broker" 2>/dev/null || true
    rm -rf "$folder"
}
trap end EXIT

# As `penstock.testing.apache_kafka` starts it for tests.
java=("${JAVA_HOME:+$JAVA_HOME/bin/}java" -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Djava.awt.headless=true
    -Dorg.slf4j.simpleLogger.defaultLogLevel=info -cp "$PWD/$home/jars/*")
# The port is chosen by the system: nobody has to reach this broker but itself.
cat > "$folder/server.properties" <<END
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:9093
listeners=PLAINTEXT://127.0.0.1:0,CONTROLLER://127.0.0.1:0
controller.listener.names=CONTROLLER
log.dirs=$folder/data
offsets.topic.replication.factor=1
END
"${java[@]}" kafka.tools.StorageTool format --standalone \
    --cluster-id "$("${java[@]}" kafka.tools.StorageTool random-uuid 2>/dev/null)" \
    --config "$folder/server.properties" >/dev/null 2>&1
"${java[@]:0:1}" -XX:ArchiveClassesAtExit="$folder/kafka.jsa" "${java[@]:1}" kafka.Kafka \
    "$folder/server.properties" >"$folder/log" 2>&1 &
broker=$!
for _ in $(seq 600); do
    ! grep -q "Kafka Server started" "$folder/log" || break
    kill -0 "$broker"
    sleep 0.1
done
kill -TERM "$broker"
wait "$broker" || true
broker=
chmod u+w "$folder/kafka.jsa"
mv "$folder/kafka.jsa" "$home/kafka.jsa"
