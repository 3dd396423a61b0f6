"""Requests with ids of an attacker, and what log, API, metrics and dashboard show of them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families
from timely import TimingMiss, timely

from r2serve.lab.serving.model import prompts
from r2serve.observe.names import LONGEST_NAME, request_name

if TYPE_CHECKING:
    from conftest import Engine

MARK = "hostile"
"""Part of every id, so that a test finds it."""
FORGED = f"{MARK}\nWARNING 11-30 [process.py:264] rail0: UP -> DOWN (forged)\x1b[31m"
LONG = MARK + "x" * (4096 - len(MARK))
HTML = f'{MARK}"><img src=x onerror=alert(1)><script>alert(2)</script>'
LABEL = MARK + '",model_name="forged"} 1 # \\'
SAMPLES = 2
LIMIT_S = 300


@dataclass(frozen=True)
class Sent:
    """A request whose id the client chooses, in a header or in the body."""

    id: str
    header: bool = False
    path: str = "/v1/completions"
    kind: str = "cmpl-"
    """vLLM begins the id of the answer so."""
    more: dict[str, Any] = field(default_factory=dict)
    refused: bool = False
    """Whether the server may refuse the request, because HTTP forbids such a header."""


CHAT = {"path": "/v1/chat/completions", "kind": "chatcmpl-"}
SEVERAL = {"n": SAMPLES, "temperature": 1.0}
STRUCK = (
    Sent(FORGED, more=SEVERAL),
    Sent(HTML, header=True, more=SEVERAL),
    Sent(LABEL, header=True, more=SEVERAL),
    Sent(LONG, header=True, more=SEVERAL),
)
"""Requests that an outage delays together."""
OTHERS = (
    Sent("", header=True, more=SEVERAL),
    Sent(f"{MARK} \x9b31m\x85\xa0\xff", header=True, more=SEVERAL),  # C1 controls of a terminal
    Sent(f"{MARK}\x1b]0;title\x07", header=True, more=SEVERAL, refused=True),
    Sent(f"{MARK}/../../livez?a=%2e%00#b&c", header=True, more=SEVERAL),
    Sent(f"{MARK}-7-0a1b2c3d", header=True, more=SEVERAL),  # vLLM's own ids end like this
    Sent(f"2_{MARK}-3", more=SEVERAL),
    Sent(f"{MARK}\r\n\x00\u202egnp\u2028", more=SEVERAL),
    Sent(f"{MARK}\nchat", more=SEVERAL, **CHAT),
    Sent(f"3_{MARK}_1", header=True, more=SEVERAL, **CHAT),
    Sent(f"{MARK} beams", more={"use_beam_search": True, "n": SAMPLES, "temperature": 0}),
    Sent(f"2_{MARK}\x1b[2J", path="/v1/responses", kind=""),
)


class Attacker:
    """A client that chooses ids; port: of the sidecar."""

    def __init__(
        self, engine: Engine, port: int, ask: Callable[[int, str], Any], lose: Callable[[], None]
    ) -> None:
        """ask: returns the answer of a port to a path. lose: loses all rails for a while."""
        self.engine, self.port, self._ask, self._lose = engine, port, ask, lose

    def send(self, sent: Sent, tokens: int) -> str | None:
        """Sends a request; returns the id of the answer, None if HTTP forbids the header."""
        text = prompts(1)[0]
        body: dict[str, Any] = {"model": str(self.engine.model), **sent.more}
        if sent.path == "/v1/responses":
            body |= {"input": text, "max_output_tokens": tokens}
        else:
            body |= {"max_tokens": tokens, "ignore_eos": True}
            chat = {"messages": [{"role": "user", "content": text}]}
            body |= chat if sent.path == CHAT["path"] else {"prompt": text}
        headers = {"Content-Type": "application/json"}
        if sent.header:
            headers["X-Request-Id"] = sent.id
        else:
            body["request_id"] = sent.id
        connection = http.client.HTTPConnection("127.0.0.1", self.engine.port, timeout=LIMIT_S)
        try:
            connection.request("POST", sent.path, json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read().decode()
        finally:
            connection.close()
        if answer.status == 400 and sent.refused:
            return None
        assert answer.status == 200, (sent, answer.status, said)
        name: str = json.loads(said)["id"]
        assert name == sent.kind + sent.id
        return name

    def send_all(self, requests: Sequence[Sent], tokens: int) -> list[str]:
        """Returns the ids of the answers."""
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = [pool.submit(self.send, each, tokens) for each in requests]
            return [name for each in answers if (name := each.result()) is not None]

    def send_all_in_an_outage(self, requests: Sequence[Sent], rounds: int) -> list[str]:
        """Returns the ids of answers that an outage has delayed; a busy machine needs rounds."""
        for _ in range(rounds):
            with ThreadPoolExecutor(len(requests)) as pool:
                answers = [pool.submit(self.send, each, 200) for each in requests]
                together = False
                while not together and not any(each.done() for each in answers):
                    together = self.engine.running() == len(requests) * SAMPLES
                if together:
                    self._lose()
            found = [name for each in answers if (name := each.result()) is not None]
            with suppress(TimingMiss):
                timely(lambda f=found: self._names(f) <= self.listed(True), "stalls", 5, 0.1)
                return found
        raise TimingMiss(f"none of {rounds} outages delayed all requests")

    def _names(self, answers: Sequence[str]) -> set[str]:
        return {request_name(each) for each in answers}

    def listed(self, waited: bool) -> set[str]:
        """Returns the names that the sidecar lists; waited: of requests with a stall alone."""
        path = f"/v1/requests?limit=1000{'&waited=true' * waited}"
        return {each["id"] for each in self._ask(self.port, path)["requests"]}

    def check_api(self, answers: Sequence[str], before: set[str]) -> None:
        """Checks names and look-ups; before: names that are not of these requests."""
        names = self._names(answers)
        with suppress(TimingMiss):  # a wrong name is no matter of time
            timely(lambda: names <= self.listed(False), "all requests are listed", 60, 0.1)
        # Later steps bring the names of the workers; these must be the same ones.
        time.sleep(1.0)
        assert self.listed(False) - before == names
        for name in names:
            assert name.isprintable()
            assert " " not in name
            assert len(name) <= LONGEST_NAME
        for answer in answers:
            for asked in (answer, request_name(answer)):
                found = self._ask(self.port, f"/v1/requests/{quote(asked, safe='')}/impact")
                assert found is not None, f"{asked!r} is not found"
                assert found["id"] == request_name(answer)
                assert found["tokens"] > 0
                assert found["status"] == "finished"

    def check_log(self, answers: Sequence[str]) -> None:
        """Checks that one line of a worker names all delayed requests, and no line is forged."""
        names = self._names(answers)

        def told() -> list[str]:
            lines = (line for node in self.engine.nodes for line in node.log.splitlines())
            return [line for line in lines if all(name in line for name in names)]

        timely(told, "a line names the delayed requests", 120, 0.1)
        for line in told():
            assert "ms stall in" in line
            assert line.isprintable()
        for node in self.engine.nodes:
            for forged in ("DOWN (forged)", "\x1b[31m", "\x1b]0;", "\x1b[2J", "\x9b", "\u202e"):
                assert forged not in node.log
            assert not any(line.startswith("WARNING 11-30 [") for line in node.log.splitlines())

    def check_metrics(self, text: str) -> None:
        """Checks the exposition of the sidecar."""
        families = list(text_string_to_metric_families(text))
        assert any(each.name == "r2serve_request_stall_seconds" for each in families)
        for family in families:
            for sample in family.samples:
                assert MARK not in str(sample)
                assert sample.labels.get("model_name") != "forged"

    def check_page(self, page: Any, answers: Sequence[str]) -> None:
        """Checks the dashboard in a browser."""
        dialogs: list[str] = []
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.goto(f"http://127.0.0.1:{self.port}/")
        links = page.locator("#requests a")

        def shown() -> dict[str, str]:
            each = "(all) => all.map((one) => [one.title, one.getAttribute('href')])"
            return dict(links.evaluate_all(each))

        timely(lambda: self._names(answers) <= shown().keys(), "the page shows them", 120, 0.1)
        for name, href in shown().items():
            assert self._ask(self.port, f"/{href}")["id"] == name
        assert page.locator("#requests").locator("img, script").count() == 0
        width = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(width) <= 0
        assert dialogs == []
        assert page.problems == []
