"""A tiny Mixtral with random weights: the tiny Llama with experts in place of its MLP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from r2serve.lab.serving.model import WEIGHT_DEVIATION, TinyLlama, make_tiny_llama

EXPERTS = 4


def make_tiny_moe(directory: Path) -> Path:
    """Writes configuration, weights and tokenizer to ``directory``, and returns the directory."""
    shape = TinyLlama(layers=2)
    make_tiny_llama(directory, shape)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    (directory / "config.json").write_text(json.dumps(config))
    source = np.random.default_rng(shape.seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return source.normal(0.0, WEIGHT_DEVIATION, (rows, columns)).astype(np.float32)

    kept = load_file(directory / "model.safetensors")
    weights = {name: value for name, value in kept.items() if ".mlp." not in name}
    for layer in range(shape.layers):
        moe = f"model.layers.{layer}.block_sparse_moe"
        weights[f"{moe}.gate.weight"] = matrix(EXPERTS, shape.hidden)
        for expert in range(EXPERTS):
            for name, (rows, columns) in {
                "w1": (shape.intermediate, shape.hidden),
                "w2": (shape.hidden, shape.intermediate),
                "w3": (shape.intermediate, shape.hidden),
            }.items():
                weights[f"{moe}.experts.{expert}.{name}.weight"] = matrix(rows, columns)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
