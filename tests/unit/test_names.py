"""Texts of clients and strangers: none can write a line, a word or a control sequence of ours."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from r2serve.observe.attribution import Attribution, NewRequest, Step
from r2serve.observe.fault_report import StallReport
from r2serve.observe.journal import Journal
from r2serve.observe.names import LONGEST_NAME, printable, request_name
from r2serve.observe.port_owner import owner_of
from r2serve.observe.request_log import RequestLog
from r2serve.observe.requests import Requests

FORGED = (
    "evil\nWARNING 11-25 [process.py:264] rail0@node0 to rank 1: UP -> DOWN\x1b[31m\u202e\ud800"
)


class NoSource:
    def journal_bytes(self) -> bytes:
        raise AssertionError


@given(st.text(max_size=400))
@example(FORGED)
@example("a" * 200 + "\n")
def test_a_name_is_one_short_printable_word(identity: str) -> None:
    name = request_name(identity)
    assert name.isprintable()
    assert len(name) <= LONGEST_NAME
    assert not any(each.isspace() for each in name)
    assert request_name(name) == name
    name.encode()  # a lone surrogate would fail here, and in every log file


@pytest.mark.parametrize("identity", ["cmpl-7f-0", "chatcmpl-8c1f", "Zürich-1", "x" * LONGEST_NAME])
def test_an_ordinary_id_is_its_own_name(identity: str) -> None:
    assert request_name(identity) == identity


def test_long_ids_with_one_beginning_have_different_names() -> None:
    first, second = (request_name("x" * 500 + end) for end in "ab")
    assert first != second
    assert len(first) == len(second) == LONGEST_NAME


def test_a_forged_id_stays_one_word_of_one_log_line() -> None:
    """The part after a line end begins no line of either log."""
    steps = Attribution(list)
    steps.began(Step(1, ["id"], [], [], [NewRequest("id", FORGED, 1)]))
    report = StallReport(NoSource(), since_ns=0)
    report.add(1, steps._names(["id"]))
    line = report.line(Journal(process=1))
    assert line.isprintable()
    name = "evil\\nWARNING\\x2011-25\\x20[process.py:264]\\x20rail0@node0\\x20to\\x20rank\\x201:"
    assert f"requests: {name}" in line


def test_a_request_is_found_by_its_raw_id_and_by_its_name(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "r2ccl-0-abc.requests", writer="worker", label="rank 0")
    fields = dict.fromkeys(("scheduled_ns", "first_token_ns", "last_token_ns", "tokens"), 1)
    rest = {"worst_gap_ns": 1, "worst_gap_ended_ns": 1}
    raw = "client\n" + "x" * 300
    log.write({"request": raw} | fields | rest)  # as an earlier release wrote it
    log.write({"request": request_name("cmpl 1")} | fields | rest)
    requests = Requests(tmp_path)
    requests.look()
    for asked, name in ((raw, request_name(raw)), ("cmpl 1", request_name("cmpl 1"))):
        found = requests.get(asked)
        assert found is not None
        assert found.name == name
        assert requests.get(name) is found


def test_the_owner_of_a_port_cannot_write_to_the_terminal() -> None:
    said = {"process": 1, "serving_engine": "", "journal_dir": "/x\x1b[31m\nINFO all is well"}
    body = json.dumps(said).encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
                client.sendall(head + body)

        thread = threading.Thread(target=answer)
        thread.start()
        owner = owner_of("127.0.0.1", listener.getsockname()[1])
        thread.join()
    assert "the sidecar of all engines (process 1, journals in /x\\x1b[31m\\nINFO all" in owner
    assert owner.isprintable()


def test_ordinary_text_is_printed_as_it_is() -> None:
    assert printable("RuntimeError in a step: no room for 5 tokens") == (
        "RuntimeError in a step: no room for 5 tokens"
    )
    assert printable("a\tb\x07") == "a\\tb\\x07"
