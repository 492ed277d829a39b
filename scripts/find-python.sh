#!/bin/sh
# Prints the path of a Python that Penstock runs on: 3.11 or newer, able to make virtual
# environments. $PYTHON is taken if it is set, and must then be one.
set -u

suits() {
    # ensurepip is a package of its own on Debian, without which venv fails.
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
    if suits "$candidate"; then
        # The interpreter itself: a shim of a version manager may mean another one tomorrow.
        exec "$candidate" -c 'import sys; print(sys.executable)'
    fi
done

if [ -n "${PYTHON:-}" ]; then
    echo "find-python: PYTHON=$PYTHON is not Python 3.11 or newer with the venv module." >&2
else
    echo "find-python: no Python 3.11 or newer with the venv module was found." >&2
fi
echo "find-python: install one (Debian: python3 python3-venv), or name it: make PYTHON=..." >&2
exit 1
