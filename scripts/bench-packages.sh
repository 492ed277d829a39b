#!/bin/sh
# Installs the Debian packages that `make bench-broker` compares with and compiles against.
#
# The servers among them would start their own services on installation and take the standard
# ports; a policy-rc.d that forbids it stands in for the time of the installation and is taken
# away again (or the earlier one put back), whatever happens.
set -eu

SERVERS="nats-server rabbitmq-server redis-server"
LIBRARIES="build-essential pkg-config librdkafka-dev librabbitmq-dev libhiredis-dev libnats-dev"

missing=""
for package in $SERVERS $LIBRARIES; do
    dpkg-query -W -f='${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed$' ||
        missing="$missing $package"
done
if [ -z "$missing" ]; then
    echo "bench-packages: everything is installed"
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "bench-packages: this is not a Debian system; install by hand:$missing" >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "bench-packages: needs root; run: sudo sh scripts/bench-packages.sh" >&2
    echo "bench-packages: missing:$missing" >&2
    exit 1
fi

policy=/usr/sbin/policy-rc.d
saved=""
restore() {
    if [ -n "$saved" ]; then
        mv -f "$saved" "$policy"
    else
        rm -f "$policy"
    fi
}
if [ -e "$policy" ]; then
    saved=$(mktemp "$policy.saved.XXXXXX")
    cp -p "$policy" "$saved"
fi
trap restore EXIT
trap 'exit 1' INT TERM HUP
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"

export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # a list of names
apt-get install -y --no-install-recommends $missing ||
    { apt-get update && apt-get install -y --no-install-recommends $missing; }
echo "bench-packages: installed$missing"
