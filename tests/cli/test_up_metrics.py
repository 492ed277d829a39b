"""`penstock up --metrics`: a page that Prometheus can read, and a line that says where it is."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.runner import Live, run
from tests.cli.test_up import printed, up


@pytest.mark.parametrize("where", ["0", ":0", "127.0.0.1:0", "[::1]:0"])
def test_the_page_is_where_it_says(tmp_path: Path, where: str) -> None:
    def look(live: Live) -> None:
        address = printed(live, r"metrics +(\S+)\n")[1]
        with urlopen(address, timeout=60) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        assert "penstock_info" in {family.name for family in families}
        with urlopen(address.replace("/metrics", "/healthz"), timeout=60) as answer:
            assert answer.read() == b"ok\n"

    up(tmp_path / "data", "--metrics", where, look=look).ok()


def test_what_cannot_be_served_is_explained(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = run("up", "--data", str(tmp_path / "data"), "--listen", "0", "--metrics", port)
    assert ran.status == 1
    assert "cannot serve metrics" in ran.err
    assert "--metrics" in ran.err


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (("--metrics", "here"), 2),
        (("--alert-before", "soon"), 2),
        (("--alert-webhook", "mailto:me"), 1),
    ],
)
def test_wrong_settings(tmp_path: Path, args: tuple[str, ...], status: int) -> None:
    ran = run("up", "--data", str(tmp_path / "data"), *args)
    assert ran.status == status
    assert "Traceback" not in ran.err
