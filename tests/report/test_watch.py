from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import threading

import pytest

from isthmus.core.recipe import RecipeError
from isthmus.report.watch import Watch, prometheus, snapshot
from isthmus.runner import run

from ..conftest import digits_recipe

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("watch") / "run"
    changes = {
        "rounds": 5,
        "evaluate.references": False,
        "engine.dropout": 0.2,
        "channels": [{"kind": "attack", "clients": [2], "what": "nan"}],
        "name": "over-the-wire",
    }
    run(digits_recipe(**changes), where)
    return where


@pytest.fixture
def page(folder):
    with serving(Watch(folder)) as server:
        yield server


class serving:  # noqa: N801
    def __init__(self, server):
        self.server = server

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.server

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def get(server, path: str, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_the_snapshot_is_the_ledger(folder):
    found = snapshot(folder)
    rows = [json.loads(x) for x in (folder / "ledger.jsonl").read_text().splitlines()]
    assert (found["state"], found["total"], len(found["rounds"])) == ("finished", 5, 5)
    assert [r["global"] for r in found["rounds"]] == [r["evaluation"]["global"]["accuracy"] for r in rows]
    assert sum(c["up"] for c in found["clients"]) == sum(s[1] for r in rows for s in r["up"].values())
    assert found["clients"][2]["last"] is None
    assert found["clients"][2]["missed"] == sum("2" in r["missing"] for r in rows)


def test_metrics_are_prometheus_text(folder):
    text = prometheus(snapshot(folder))
    line = re.compile(r'isthmus_[a-z_]+\{[a-z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-z_]+="(?:[^"\\\n]|\\.)*")*\} -?[0-9.e+-]+\Z')
    values = [x for x in text.splitlines() if not x.startswith("#")]
    assert all(line.match(x) for x in values)
    assert 'isthmus_rounds_done{run="over-the-wire"} 5' in values
    assert int(re.search(r"isthmus_refused_total\{[^}]*\} (\d+)", text)[1]) >= 1
    odd = prometheus(snapshot(folder) | {"name": 'a"b\\c\nd'})
    assert all(line.match(x) for x in odd.splitlines() if not x.startswith("#"))


def test_pages_and_nothing_else(page):
    status, text, headers = get(page, "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert get(page, "/data.json")[0] == get(page, "/metrics")[0] == 200
    for path in ("/../ledger.jsonl", "/ledger.jsonl", "/%2e%2e/recipe.toml", "//etc/passwd", "/x"):
        assert get(page, path)[0] == 404
    assert "Traceback" not in text
    assert get(page, "/data.json", Host="evil.example")[0] == 421


def test_beyond_this_machine_a_token_is_needed(folder):
    with serving(Watch(folder, "0.0.0.0")) as server:
        assert len(server.token) >= 20
        assert server.token in server.url
        assert get(server, "/data.json")[0] == 403
        assert get(server, "/data.json?token=wrong")[0] == 403
        assert get(server, f"/data.json?token={server.token}")[0] == 200
        assert get(server, "/metrics", Authorization=f"Bearer {server.token}")[0] == 200


def test_no_run_is_a_clear_error(tmp_path):
    with pytest.raises(RecipeError, match="not a run folder"):
        Watch(tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_it_and_follows_the_run(folder, tmp_path):
    going = tmp_path / "going"
    shutil.copytree(folder, going)
    (going / "result.json").unlink()
    lines = (going / "ledger.jsonl").read_text().splitlines()
    (going / "ledger.jsonl").write_text("\n".join(lines[:2]) + "\n")
    hostile = json.loads(lines[2])
    hostile["missing"]["1"] = "refused: <img src=x onerror=document.title='owned'>"
    with serving(Watch(going)) as server:

        def shown() -> str:
            command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom", server.url]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=90, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
            ).stdout

        before = shown()
        assert '<span id="name">over-the-wire</span>' in before
        assert "2 of 5" in before
        assert 'class="running"' in before
        assert before.count("<polyline") >= 3
        (going / "ledger.jsonl").write_text("\n".join([*lines[:2], json.dumps(hostile), *lines[3:]]) + "\n")
        after = shown()
        assert "5 of 5" in after
        assert "&lt;img src=x" in after
        assert "owned</title>" not in after
        assert after.count('class="refused"') >= 2
