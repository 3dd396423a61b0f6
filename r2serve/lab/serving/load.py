"""Streams concurrent greedy requests from an OpenAI API and records the time of each token.

Run by path inside a node, because the load must share the server's network namespace. Imports
nothing of r2serve, for a short start-up time. Standard input is a JSON object, the order:

    {"mode": "wait", "url": …, "timeout_s": …}
        Exit status 0 once /health answers 200, 1 after timeout_s.

    {"mode": "stream", "url": …, "model": …, "prompts": [...], "max_tokens": [per prompt, ...],
     "result": PATH}
        Sends a request per prompt, all at once. Every 100 ms, prints {"tokens": received so far,
        "streaming": requests in flight, "finished": …}. At the end, SIGTERM included, writes
        {"requests": [{"prompt": index, "sent_ns", "token_ids", "times_ns", "text", "error",
        "finished", "id", "attempts"}]} to PATH. Times are CLOCK_MONOTONIC; times_ns has an entry
        per token.

    {"mode": "loop", …, "streams": …}
        Keeps `streams` requests in flight, with rotating prompts, until standard input closes;
        then waits for the requests in flight.

    {"mode": "timed", …, "arrivals_s": [...], "streams": …}
        Sends a request per prompt at the given time since the start, with at most `streams`
        requests in flight (0 = unlimited). sent_ns is the due time if streams is 0, else the time
        of sending; 0 = not sent. With "retry", a failed request is sent again until success or the
        end of the run, and results of earlier attempts are dropped. Prints {"begun_ns": …} first.

    {"mode": "turns", …, "streams": …, "begin_ns": …, "until_ns": …, "period_ns": …,
     "turn_ns": [first, last]}
        Like "loop", but requests begin only between begin_ns and until_ns (CLOCK_MONOTONIC), and
        within each period only between the offsets first and last; then waits for the requests in
        flight.

"extra" in an order replaces the vLLM-specific request fields. Without token ids in the response,
each piece of text counts as a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

REPORT_INTERVAL_S = 0.1
# A dead server refuses connections at once; the pause limits the number of failed requests.
PAUSE_AFTER_ERROR_S = 0.5
EXTRA = {"ignore_eos": True, "return_token_ids": True}


@dataclass
class Stream:
    """Data received for a request."""

    prompt: int = 0
    sent_ns: int = 0
    token_ids: list[int] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""
    finished: bool = False
    id: str = ""
    attempts: int = 1

    def begin_anew(self) -> None:
        self.token_ids, self.times_ns, self.text, self.error, self.id = [], [], "", "", ""
        self.attempts += 1

    def take(self, chunk: dict[str, Any], now_ns: int, *, by_text: bool = False) -> None:
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
            return
        self.id = self.id or str(chunk.get("id", ""))
        for choice in chunk.get("choices", []):
            ids = choice.get("token_ids") or []
            text = choice.get("text") or ""
            self.token_ids.extend(ids)
            self.times_ns.extend([now_ns] * (bool(text) if by_text else len(ids)))
            self.text += text
            self.finished = self.finished or choice.get("finish_reason") is not None


async def wait_until_healthy(url: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return True
            await asyncio.sleep(0.25)
    return False


async def stream_one(session: aiohttp.ClientSession, order: dict[str, Any], stream: Stream) -> None:
    stream.sent_ns = stream.sent_ns or time.monotonic_ns()
    extra = order.get("extra", EXTRA)
    body = {
        "model": order["model"],
        "prompt": order["prompts"][stream.prompt],
        "max_tokens": order["max_tokens"][stream.prompt],
        "temperature": 0,
        "stream": True,
        **extra,
    }
    by_text = not extra.get("return_token_ids")
    try:
        async with session.post(f"{order['url']}/v1/completions", json=body) as answer:
            if answer.status != 200:
                stream.error = f"HTTP {answer.status}: {(await answer.text())[:500]}"
                return
            async for line in answer.content:
                payload = line.removeprefix(b"data: ").strip()
                if payload and payload != b"[DONE]":
                    stream.take(json.loads(payload), time.monotonic_ns(), by_text=by_text)
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.error = f"{type(error).__name__}: {error}"


async def report(streams: list[Stream], retry: bool) -> None:
    while True:
        await asyncio.sleep(REPORT_INTERVAL_S)
        tokens = sum(len(stream.times_ns) for stream in streams)
        finished = sum(stream.finished for stream in streams)
        # A failed request awaiting a retry counts as in flight.
        ended = (s.finished or (s.error and not retry) for s in streams if s.sent_ns)
        running = sum(not each for each in ended)
        progress = {"tokens": tokens, "streaming": running, "finished": finished}
        sys.stdout.write(json.dumps(progress) + "\n")
        sys.stdout.flush()


async def each_once(
    session: aiohttp.ClientSession, order: dict[str, Any], streams: list[Stream]
) -> None:
    streams.extend(Stream(prompt) for prompt in range(len(order["prompts"])))
    await asyncio.gather(*(stream_one(session, order, stream) for stream in streams))


async def in_turn(
    session: aiohttp.ClientSession, order: dict[str, Any], streams: list[Stream]
) -> None:
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            closed.set()

    async def keep_one_under_way() -> None:
        while not closed.is_set():
            streams.append(stream := Stream(len(streams) % len(order["prompts"])))
            await stream_one(session, order, stream)
            if stream.error:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    loop.add_reader(sys.stdin.fileno(), read)
    await asyncio.gather(*(keep_one_under_way() for _ in range(order["streams"])))


async def in_own_turns(
    session: aiohttp.ClientSession, order: dict[str, Any], streams: list[Stream]
) -> None:
    begin_ns: int = order["begin_ns"]
    until_ns: int = order["until_ns"]
    period_ns: int = order["period_ns"]
    first_ns: int
    last_ns: int
    first_ns, last_ns = order["turn_ns"]

    def idle_ns(now_ns: int) -> int:
        """Returns the time until the next window of this load, ns; 0 inside a window."""
        if now_ns < begin_ns:
            return begin_ns - now_ns
        at_ns = (now_ns - begin_ns) % period_ns
        return 0 if first_ns <= at_ns < last_ns else (first_ns - at_ns) % period_ns

    async def keep_one_under_way() -> None:
        while (now_ns := time.monotonic_ns()) < until_ns:
            if idle := idle_ns(now_ns):
                await asyncio.sleep(min(idle, until_ns - now_ns) / 1e9)
                continue
            streams.append(stream := Stream(len(streams) % len(order["prompts"])))
            await stream_one(session, order, stream)
            if stream.error:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)

    await asyncio.gather(*(keep_one_under_way() for _ in range(order["streams"])))


async def timed(
    session: aiohttp.ClientSession, order: dict[str, Any], streams: list[Stream]
) -> None:
    begun_ns = time.monotonic_ns()
    sys.stdout.write(json.dumps({"begun_ns": begun_ns}) + "\n")
    sys.stdout.flush()
    free = asyncio.Semaphore(order["streams"] or len(order["prompts"]))

    async def send(stream: Stream, at_s: float) -> None:
        due_ns = begun_ns + int(at_s * 1e9)
        await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
        async with free:
            stream.sent_ns = time.monotonic_ns() if order["streams"] else due_ns
            await stream_one(session, order, stream)
            while order.get("retry") and not stream.finished:
                await asyncio.sleep(PAUSE_AFTER_ERROR_S)
                stream.begin_anew()
                await stream_one(session, order, stream)

    streams.extend(Stream(prompt) for prompt in range(len(order["prompts"])))
    await asyncio.gather(*map(send, streams, order["arrivals_s"]))


SENDERS = {"stream": each_once, "loop": in_turn, "timed": timed, "turns": in_own_turns}


async def stream_all(order: dict[str, Any]) -> list[Stream]:
    streams: list[Stream] = []
    send = SENDERS[order["mode"]]
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    # A new connection per request: the server closes connections after 5 s idle, possibly just
    # before the next request arrives.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    # No total timeout: the caller decides on the length of stalls, and ends the run by SIGTERM.
    timeout = aiohttp.ClientTimeout(total=None)
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        reporter = asyncio.create_task(report(streams, bool(order.get("retry"))))
        work = asyncio.create_task(send(session, order, streams))
        stop = asyncio.create_task(stopped.wait())
        pending: list[asyncio.Future[Any]] = [work, stop]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, stop, reporter):
            task.cancel()
        outcome, *_ = await asyncio.gather(work, stop, reporter, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome
    for stream in streams:
        if not stream.finished and not stream.error:
            stream.error = "unfinished when stopped" if stopped.is_set() else "stream ended early"
    return streams


def main() -> int:
    order = json.loads(sys.stdin.readline())
    if order["mode"] == "wait":
        return 0 if asyncio.run(wait_until_healthy(order["url"], order["timeout_s"])) else 1
    streams = asyncio.run(stream_all(order))
    result = {"requests": [asdict(stream) for stream in streams]}
    Path(order["result"]).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
