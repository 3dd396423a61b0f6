"""Features of the engine, each with requests whose answers must not depend on a lost rail."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from r2serve.lab.serving.model import TinyLlama, prompts, vocabulary

if TYPE_CHECKING:
    from conftest import Engine

SHAPE = TinyLlama(layers=2)
"""Shape of the model that the fixtures of this folder make."""
EXACT = ["--dtype", "float32"]
"""Flags for answers that do not depend on the batch; vLLM takes half precision otherwise."""
TOKENS = 160
LONG_PROMPTS = prompts(6, words=300)
REPEATING = [" ".join(prompt.split()[:4] * 8) for prompt in prompts(4)]
CHOICES = vocabulary(SHAPE)[40:56]
"""Words that the structured output may have."""
WORDS = 100
"""Number of tokens of a structured output."""
SYLLABLES = 3
"""Longest word of the vocabulary: a token may be as many of CHOICES."""
LIMIT_S = 600


@dataclass(frozen=True)
class Feature:
    """A feature: flags of the server, requests, and the metric that shows the feature at work."""

    flags: Callable[[Path], list[str]]
    """Takes a folder for files of the feature."""
    ask: Callable[[Engine], Any]
    """Sends all requests and returns the answers, comparable with ==."""
    metric: str = ""
    """Counter of vLLM that is above 0 after the requests; empty: ``check`` shows the feature."""
    check: Callable[[Any], bool] = bool
    """Whether answers show the feature at work."""


def post(engine: Engine, path: str, body: dict[str, Any]) -> Any:
    """Sends a request to the first node; returns the parsed answer.

    Raises:
        AssertionError: the answer is an error.
    """
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 200, text
        return json.loads(text)
    finally:
        connection.close()


def completion(engine: Engine, prompt: str, **more: Any) -> list[str]:
    """Returns the texts of a completion, greedy unless ``more`` says otherwise."""
    body = {
        "model": str(engine.model),
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    choices = post(engine, "/v1/completions", body | more)["choices"]
    return [one["text"] for one in sorted(choices, key=lambda one: one["index"])]


def together(asks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs requests at the same time; returns their results in order."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return [each.result() for each in [pool.submit(ask) for ask in asks]]


def completions(words: Sequence[str], **more: Any) -> Callable[[Engine], list[Any]]:
    def ask(engine: Engine) -> list[Any]:
        return together(
            [lambda prompt=prompt: completion(engine, prompt, **more) for prompt in words]
        )

    return ask


def stream(engine: Engine, prompt: str, leave_after: int) -> str:
    """Reads a stream; ``leave_after``: number of words after which the client leaves; 0: none."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=LIMIT_S)
    body = {
        "model": str(engine.model),
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["text"]
            if 0 < leave_after <= len(text.split()):  # a part may have the words of several steps
                return ""
        return text
    finally:
        connection.close()


def with_aborts(engine: Engine) -> list[str]:
    """Six streams, of which every other one is left after some tokens."""
    return together(
        [
            lambda prompt=prompt, place=place: stream(engine, prompt, 20 * (place % 2) * place)
            for place, prompt in enumerate(prompts(6))
        ]
    )


def embeddings(engine: Engine) -> list[list[float]]:
    found = []
    for prompt in prompts(4, words=200) * 40:
        body = {"model": str(engine.model), "input": prompt}
        found.append(post(engine, "/v1/embeddings", body)["data"][0]["embedding"])
    return found


ADAPTERS = ("one", "other")


def with_adapters(engine: Engine) -> list[Any]:
    """Each prompt with each adapter, all at the same time.

    The base model is left out: beside a request with an adapter, vLLM's CPU build computes a
    request without one with an adapter, too.
    """
    asks = [
        lambda prompt=prompt, adapter=adapter: completion(engine, prompt, model=adapter)
        for prompt in prompts(3)
        for adapter in ADAPTERS
    ]
    return together(asks)


def lora_flags(folder: Path) -> list[str]:
    made = [f"{name}={make_adapter(folder / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    return [
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", str(len(made))),
        *("--lora-modules", *made),
    ]


def make_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Writes a LoRA adapter with random weights for the query and value projections."""
    folder.mkdir(parents=True)
    source = np.random.default_rng(seed)
    narrow = SHAPE.hidden * SHAPE.key_value_heads // SHAPE.heads
    tensors = {}
    for layer in range(SHAPE.layers):
        for name, outputs in (("q_proj", SHAPE.hidden), ("v_proj", narrow)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, size in (("A", (rank, SHAPE.hidden)), ("B", (outputs, rank))):
                weights = source.normal(0.0, 0.2, size).astype(np.float32)
                tensors[f"{place}.lora_{part}.weight"] = weights
    save_file(tensors, folder / "adapter_model.safetensors")
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    return folder


def _flags(*words: str) -> Callable[[Path], list[str]]:
    return lambda _: list(words)


def _only_choices(answers: list[Any]) -> bool:
    """Whether the texts are made of CHOICES; the last choice may be a part of one."""
    parts = {choice[:length] for choice in CHOICES for length in range(1, len(choice))}
    made = re.compile(f"({'|'.join(CHOICES)})+({'|'.join(parts)})?")
    return all(made.fullmatch(text.replace(" ", "")) for texts in answers for text in texts)


FEATURES = {
    "ngram speculation": Feature(
        _flags(
            "--speculative-config",
            json.dumps(
                {
                    "method": "ngram",
                    "num_speculative_tokens": 4,
                    "prompt_lookup_min": 1,
                    "prompt_lookup_max": 3,
                }
            ),
        ),
        completions(REPEATING, max_tokens=64),  # drafting takes much time on a CPU
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "LoRA": Feature(
        lora_flags,
        with_adapters,
        check=lambda answers: all(a != b for a, b in zip(answers[::2], answers[1::2], strict=True)),
    ),
    "structured output": Feature(
        _flags(),
        # A grammar that may not end before the last token: the model cannot choose to stop.
        completions(
            prompts(4),
            max_tokens=WORDS,
            structured_outputs={"regex": f"({'|'.join(CHOICES)}){{{SYLLABLES * WORDS}}}"},
        ),
        check=_only_choices,
    ),
    "prefix cache": Feature(
        _flags("--enable-prefix-caching"),
        completions([LONG_PROMPTS[0]] * 4),
        "vllm:prefix_cache_hits_total",
    ),
    "chunked prefill": Feature(
        _flags("--max-num-batched-tokens", "64", "--no-enable-prefix-caching"),
        completions(LONG_PROMPTS),
        check=lambda answers: len({text for texts in answers for text in texts}) > 1,
    ),
    "n=4": Feature(
        _flags(),
        completions(prompts(2), n=4, temperature=1.0, seed=3),
        check=lambda answers: all(len(set(texts)) == 4 for texts in answers),
    ),
    "aborts in mid-stream": Feature(
        _flags(),
        with_aborts,
        check=lambda answers: [bool(text) for text in answers] == [True, False] * 3,
    ),
    "embeddings": Feature(
        _flags("--runner", "pooling", "--convert", "embed"),
        embeddings,
        check=lambda answers: answers[0] != answers[1],
    ),
}
