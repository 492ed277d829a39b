#!/bin/sh
# Installs the system packages that are missing, and only those.
#
#   system-packages.sh python   what running Penstock needs: Python with venv
#   system-packages.sh java     also what flows need: a Java runtime, 17 or newer
#   system-packages.sh test     also what the tests need: kcat, a JDK, Maven, servers
#
# As root on Debian or Ubuntu it installs them; elsewhere it names them and fails.
set -eu

here=$(dirname "$0")
want=${1:-test}

has() { command -v "$1" >/dev/null 2>&1; }

# The major version of a JDK; both java and javac must be there.
java_major() {
    if has javac && has java; then
        javac -version 2>&1 | sed -n 's/^javac \([0-9]*\).*/\1/p'
    fi
}

# A PostgreSQL server that tests can start on their own, 14 or newer.
has_postgres() {
    for server in /usr/lib/postgresql/*/bin/postgres; do
        [ -x "$server" ] || continue
        version=${server#/usr/lib/postgresql/}
        [ "${version%%/*}" -lt 14 ] || return 0
    done
    return 1
}

missing=""
if ! "$here/find-python.sh" >/dev/null 2>&1; then
    missing="$missing python3 python3-venv"
fi
if [ "$want" = java ] && [ -z "${JAVA_HOME:-}" ] && ! has java; then
    missing="$missing default-jre-headless"
fi
if [ "$want" = test ]; then
    has kcat || missing="$missing kcat"
    major=$(java_major)
    [ "${major:-0}" -ge 17 ] || missing="$missing default-jdk-headless"
    has mvn || missing="$missing maven"
    # The server alone, without the package that would start it as a service.
    has mariadbd || [ -x /usr/sbin/mariadbd ] || missing="$missing mariadb-server-core"
    has_postgres || missing="$missing postgresql"
    # Its check program is the server itself, by another name; the server's package would start one.
    has redis-server || has redis-check-rdb || missing="$missing redis-tools"
fi
[ -n "$missing" ] || exit 0

if ! has apt-get; then
    echo "system-packages: these are missing, install them with your system's package manager" >&2
    echo "system-packages: (Debian's names; the JDK must be 17 or newer):$missing" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "system-packages: these packages are missing and only root can install them. Run:" >&2
    echo "system-packages:   sudo apt-get install --no-install-recommends$missing" >&2
    exit 1
fi

echo "system-packages: installing$missing"
export DEBIAN_FRONTEND=noninteractive
# Another apt on this machine is waited for.
apt-get -q -o DPkg::Lock::Timeout=300 update
case "$missing " in
*" postgresql "*)
    # Only the programs are wanted: with this no cluster is made, and none is started as a service.
    apt-get -y -q -o DPkg::Lock::Timeout=300 install --no-install-recommends postgresql-common
    clusters=/etc/postgresql-common/createcluster.conf
    cp -p "$clusters" "$clusters.penstock"
    trap 'mv -f "$clusters.penstock" "$clusters"' EXIT
    sed -i 's/^#* *create_main_cluster *=.*/create_main_cluster = false/' "$clusters"
    ;;
esac
# shellcheck disable=SC2086  # a list of names
apt-get -y -q -o DPkg::Lock::Timeout=300 install --no-install-recommends $missing

"$here/find-python.sh" >/dev/null
