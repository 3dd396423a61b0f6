"""A tiny Llama with random weights and a matching tokenizer, created locally within seconds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
WEIGHT_DEVIATION = 0.1


@dataclass(frozen=True)
class TinyLlama:
    """Shape of the model.

    hidden must be a multiple of heads, and heads a multiple of key_value_heads.
    """

    layers: int = 4
    hidden: int = 256
    intermediate: int = 512
    heads: int = 8
    key_value_heads: int = 4
    vocabulary: int = 1024
    max_positions: int = 16384
    seed: int = 20


def _words(count: int, seed: int) -> list[str]:
    """Returns `count` distinct pronounceable words for the tokenizer's vocabulary."""
    source = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = source.randint(1, 3)
        word = "".join(
            source.choice("bdfghklmnprstvz") + source.choice("aeiou") for _ in range(syllables)
        )
        words[word] = None
    return list(words)


def vocabulary(shape: TinyLlama) -> list[str]:
    """Returns the words of the model's tokenizer, a word per token."""
    return _words(shape.vocabulary - len(SPECIAL_TOKENS), shape.seed)


def prompts(count: int, words: int = 12, shape: TinyLlama | None = None) -> list[str]:
    """Returns `count` random prompts of `words` words from the model's vocabulary."""
    shape = shape or TinyLlama()
    known = vocabulary(shape)
    source = random.Random(shape.seed + 1)
    return [" ".join(source.choices(known, k=words)) for _ in range(count)]


def make_tiny_llama(directory: Path, shape: TinyLlama | None = None) -> Path:
    """Writes configuration, weights and tokenizer to `directory`, and returns the directory.

    The weights' deviation is large enough for greedy text to depend on the context. The type is
    float32: random weights often leave the two best tokens close together, and half precision
    would make the choice depend on the batch size.
    """
    shape = shape or TinyLlama()
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _configuration(shape))
    save_file(_weights(shape), directory / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(directory, shape)
    return directory


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _configuration(shape: TinyLlama) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL_TOKENS.index("<s>"),
        "eos_token_id": SPECIAL_TOKENS.index("</s>"),
        "torch_dtype": "float32",
    }


def _weights(shape: TinyLlama) -> dict[str, np.ndarray]:
    """Returns all tensors, shape (outputs, inputs) as in torch.nn.Linear; norms are ones."""
    source = np.random.default_rng(shape.seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return source.normal(0.0, WEIGHT_DEVIATION, (rows, columns)).astype(np.float32)

    hidden, wide = shape.hidden, shape.intermediate
    narrow = hidden * shape.key_value_heads // shape.heads
    ones = np.ones(hidden, dtype=np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, hidden),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(shape.vocabulary, hidden),
    }
    for layer in range(shape.layers):
        sizes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        for name, (rows, columns) in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones
    return tensors


def _save_tokenizer(directory: Path, shape: TinyLlama) -> None:
    names = [*SPECIAL_TOKENS, *vocabulary(shape)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": shape.max_positions,
            # Clients that chat get an error from a model without a template.
            "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
        },
    )
