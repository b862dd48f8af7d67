"""The door of a site: whoever comes at once, one process stands behind it."""

from __future__ import annotations

import threading

from isthmus.deploy import door


def test_a_folder_is_held_by_one_until_it_is_let_go(tmp_path):
    first = door.alone(tmp_path)
    assert first is not None
    assert door.alone(tmp_path) is None
    threading.Timer(0.2, first.close).start()
    second = door.alone(tmp_path, 10.0)
    assert second is not None
    second.close()


def test_who_knocks_while_the_site_is_on_its_way_waits_and_starts_no_second_one(tmp_path, monkeypatch):
    monkeypatch.setattr(door, "start", lambda folder: (_ for _ in ()).throw(AssertionError("a second one")))
    lock, gone = door.alone(tmp_path), threading.Event()

    def site():
        door.serve(tmp_path, lambda message: message[::-1], 1024, 60.0, lambda: not gone.is_set())
        lock.close()

    server = threading.Timer(0.5, site)
    server.start()
    assert door.knock(tmp_path, b"abc", 30.0) == b"cba"
    gone.set()
    server.join(10)
    assert not server.is_alive()
