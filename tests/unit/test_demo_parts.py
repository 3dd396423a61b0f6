"""The demo's model, temporary directory, commands and streaming client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from timely import timely

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from aiohttp import web

from r2serve.demo.flow import tokens_for
from r2serve.lab.nodes import Node
from r2serve.lab.serving import load, vllm, workdir
from r2serve.lab.serving.client import Load, LoadError, Run
from r2serve.lab.serving.model import TinyLlama, make_tiny_llama, prompts
from r2serve.lab.serving.places import LabPlace, LocalPlace, free_port
from r2serve.lab.serving.plan import MAX_MODEL_LEN, Plan
from r2serve.lab.serving.serve import Server, environment, first_error

pytestmark = pytest.mark.slow


def test_the_model_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = (make_tiny_llama(tmp_path / name) for name in ("a", "b"))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    other = make_tiny_llama(tmp_path / "c", TinyLlama(seed=21))
    name = "model.safetensors"
    assert (first / name).read_bytes() != (other / name).read_bytes()


def test_prompts_differ_and_are_known_words(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_tiny_llama(tmp_path) / "tokenizer.json"))
    texts = prompts(8)
    assert len(set(texts)) == 8
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert len(ids) == 12
        assert tokenizer.token_to_id("<unk>") not in ids


def test_the_model_takes_chats(tmp_path: Path) -> None:
    """The answer of vLLM to a chat with a model without a template is an error."""
    from jinja2 import Template

    made = make_tiny_llama(tmp_path)
    template = json.loads((made / "tokenizer_config.json").read_text())["chat_template"]
    said = [{"role": role, "content": text} for role, text in (("system", "ba"), ("user", "fa"))]
    assert Template(template).render(messages=said).split() == ["ba", "fa"]


def test_the_work_directory_is_removed_and_logs_are_kept_on_request(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with workdir.work_directory(kept) as path:
        assert workdir.owner_pid(path.name) == os.getpid()
        (path / "r2ccl-node0.log").write_text("hello")
        (path / "model").mkdir()
        (path / "model" / "weights").write_text("large")
    assert not path.exists()
    assert [file.name for file in kept.iterdir()] == ["r2ccl-node0.log"]


def test_only_directories_of_dead_demos_are_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = tmp_path / f"r2serve-demo-{ended.pid}-abc"
    kept = [tmp_path / f"r2serve-demo-{os.getpid()}-abc", tmp_path / "r2serve-demo-notes"]
    for path in (stale, *kept):
        path.mkdir()
    link = tmp_path / f"r2serve-demo-{ended.pid}-link"
    link.symlink_to(kept[0])
    assert workdir.sweep(tmp_path) == [stale]
    assert not stale.exists()
    assert all(path.exists() for path in (*kept, link))


def test_requests_are_long_enough_and_fit_the_model() -> None:
    assert tokens_for(50.0, 20.0) == 1000
    assert tokens_for(0.1, 20.0) == 256
    assert tokens_for(10_000.0, 20.0) < MAX_MODEL_LEN


def test_stock_data_and_r2ccl_bootstrap_take_different_ports(tmp_path: Path) -> None:
    def env(r2ccl: bool, lab: bool) -> dict[str, str]:
        return environment(Plan("x", tmp_path, r2ccl, lab, tmp_path, 8), LocalPlace(), 0)

    assert env(False, True)["GLOO_SOCKET_IFNAME"] == "rail0"
    assert env(True, True)["GLOO_SOCKET_IFNAME"] == "mgmt0"
    assert env(True, False)["R2CCL_NODE"] == "per-rank"
    assert "R2CCL_FAULT_FILE" not in env(True, True)


def test_the_control_traffic_of_vllm_takes_the_path_that_users_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("R2CCL_CONTROL", raising=False)
    plan = Plan("x", tmp_path, True, True, tmp_path, 8)
    assert "R2CCL_CONTROL" not in environment(plan, LocalPlace(), 0)
    direct = replace(plan, settings={"R2CCL_CONTROL": "direct"})
    assert environment(direct, LocalPlace(), 0)["R2CCL_CONTROL"] == "direct"


def test_engines_side_by_side_have_the_options_of_data_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "command", lambda name: name)
    places = [LabPlace(Node(index, 2, cast("Any", None), False)) for index in (0, 1)]
    plan = Plan("x", tmp_path, True, True, tmp_path, 8, tensor_parallel=1, data_parallel=4)
    head, other = (vllm.arguments(plan, places, index, "h", 8000, 29500) for index in (0, 1))
    shared = ["--data-parallel-size", "4", "--data-parallel-size-local", "2"]
    shared += ["--data-parallel-address", "10.77.0.1", "--data-parallel-rpc-port", "29500"]
    assert head[-len(shared) :] == shared
    assert other[-len(shared) - 3 :] == [
        *shared,
        "--headless",
        "--data-parallel-start-rank",
        "2",
    ]
    assert not {"--nnodes", "--master-addr"} & {*head, *other}
    compiled = vllm.arguments(replace(plan, eager=False), places, 0, "h", 8000, 29500)
    assert "--enforce-eager" in head
    assert "--enforce-eager" not in compiled


def test_servers_of_the_same_nodes_have_ports_of_their_own(tmp_path: Path) -> None:
    node = LabPlace(Node(0, 2, cast("Any", None), False))
    plan = Plan("x", tmp_path, True, True, tmp_path, 8)
    first, second = (Server(replace(plan, job=job), [node]) for job in (0, 1))
    assert first.url != second.url
    assert first._master_port != second._master_port


def test_a_node_without_a_management_nic_has_the_address_of_a_rail() -> None:
    node = Node(1, 2, cast("Any", None), False)
    assert [LabPlace(node, rail).address for rail in (None, 0, 1)] == [
        "10.77.0.2",
        "10.77.1.2",
        "10.77.2.2",
    ]


def _event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


async def _complete(request: web.Request) -> web.StreamResponse:
    """Answers with the behaviour named by the prompt."""
    body = await request.json()
    if body["prompt"] == "refuse":
        return web.Response(status=500, text="no")
    answer = web.StreamResponse()
    await answer.prepare(request)
    for index in range(body["max_tokens"]):
        finish = "length" if index + 1 == body["max_tokens"] else None
        if body["prompt"] == "error" and index == 1:
            await answer.write(_event({"error": {"message": "engine died"}}))
            break
        if body["prompt"] == "short" and index == 2:
            break
        if body["prompt"] == "hang" and index == 2:
            await asyncio.sleep(60)
        choice = {"text": f" {index}", "token_ids": [index], "finish_reason": finish}
        await answer.write(_event({"choices": [choice]}))
    await answer.write(_event(b"[DONE]"))
    return answer


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    app.router.add_get("/health", _healthy)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _stream(prompts_: list[str]) -> list[load.Stream]:
    async with _server() as url:
        assert await load.wait_until_healthy(url, 5)
        order: dict[str, Any] = {
            "mode": "stream",
            "url": url,
            "model": "m",
            "prompts": prompts_,
            "max_tokens": [4] * len(prompts_),
        }
        return await load.stream_all(order)


async def _healthy(request: web.Request) -> web.Response:
    return web.Response()


def test_streams_distinguish_success_from_each_failure(capsys: pytest.CaptureFixture[str]) -> None:
    good, refused, broken, short = asyncio.run(_stream(["fine", "refuse", "error", "short"]))
    assert (good.token_ids, good.text, good.finished, good.error) == (
        [0, 1, 2, 3],
        " 0 1 2 3",
        True,
        "",
    )
    assert good.times_ns == sorted(good.times_ns)
    assert refused.error == "HTTP 500: no"
    assert "engine died" in broken.error
    assert short.error == "stream ended early"
    assert short.token_ids == [0, 1]


def _in_turn(tmp_path: Path, prompts_: list[str], tokens: int, stop: Callable[[Load], None]) -> Run:
    """Runs a closed loop of two streams, stopped after `tokens` tokens; returns the results."""

    def run(url: str) -> Run:
        place = LocalPlace()
        try:
            limits = range(3, 3 + len(prompts_))
            running = Load(place, url, prompts_, limits, tmp_path / "result", streams=2)
            running.wait_for_tokens(tokens, 120)
            stop(running)
            return running.finish(120, lambda: None)
        finally:
            place.kill_all()

    async def serve_it() -> Run:
        async with _server() as url:
            return await asyncio.to_thread(run, url)

    return asyncio.run(serve_it())


def test_a_closed_loop_takes_prompts_in_turn_and_finishes_started_requests(tmp_path: Path) -> None:
    run = _in_turn(tmp_path, ["one", "two", "three"], 40, Load.drain)
    assert run.failed == 0
    assert len(run.requests) > 8
    for number, request in enumerate(run.requests):
        assert request.prompt == number % 3
        assert request.token_ids == tuple(range(3 + request.prompt))
        assert 0 < request.sent_ns <= request.times_ns[0]


@pytest.mark.parametrize("retry", [False, True])
def test_a_missing_server_counts_as_silence(retry: bool, tmp_path: Path) -> None:
    """The rule also holds while all requests have just failed and wait for another attempt."""
    place = LocalPlace()
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    more: dict[str, Any] = {"arrivals_s": [0.0, 0.0], "retry": True} if retry else {"streams": 2}
    try:
        load = Load(place, url, ["one", "two"], 4, tmp_path / "result", **more)
        began = time.monotonic()
        with pytest.raises(LoadError, match="no token for 2 s"):
            load.wait_for_tokens(1, 2.0)
        took_s = time.monotonic() - began
        timely(lambda: took_s < 30, f"silence was noticed after {took_s:.1f} s", within_s=0)
    finally:
        place.kill_all()


def test_a_request_not_yet_due_is_no_silence(tmp_path: Path) -> None:
    place = LocalPlace()

    def run(url: str) -> Run:
        try:
            load = Load(place, url, ["one", "two"], 4, tmp_path / "r", arrivals_s=[0.0, 8.0])
            load.wait_for_tokens(4, 120.0)  # the start of the process may take longer than 6 s
            return load.finish(6.0, lambda: None)
        finally:
            place.kill_all()

    async def serve_it() -> Run:
        async with _server() as url:
            return await asyncio.to_thread(run, url)

    assert asyncio.run(serve_it()).failed == 0


def test_a_closed_loop_goes_on_after_a_lost_request(tmp_path: Path) -> None:
    run = _in_turn(tmp_path, ["one", "short"], 40, Load.drain)
    lost = [request for request in run.requests if not request.completed]
    assert {request.prompt for request in lost} == {1}
    assert {request.error for request in lost} == {"stream ended early"}
    assert run.completed > 1


def test_running_requests_are_lost_when_a_closed_loop_stops(tmp_path: Path) -> None:
    run = _in_turn(tmp_path, ["one", "hang"], 10, Load.stop)
    assert {request.error for request in run.requests if request.prompt == 1} == {
        "unfinished when stopped"
    }


def test_a_port_without_a_server_is_not_healthy() -> None:
    assert not asyncio.run(load.wait_until_healthy("http://127.0.0.1:9", 0.3))


def test_local_processes_end_with_their_descendants() -> None:
    place = LocalPlace()
    process = place.popen(
        ["sh", "-c", "setsid sleep 97 & echo $!; sleep 97"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    place.kill_all()
    process.stdout.close()
    assert process.returncode is not None
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z")


def test_the_first_error_of_each_node_is_shown() -> None:
    first = (
        "INFO starting\n"
        "(Worker pid=3) ERROR [x.py:9] Traceback (most recent call last):\n"
        "(Worker pid=3) ERROR [x.py:9] r2serve.errors.ConfigError: rails: no\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert first_error([first, "INFO fine\n"]) == "node 0: r2serve.errors.ConfigError: rails: no"
    assert first_error(["INFO fine\n"]) is None
