"""A tiny Llama with random weights and a tokenizer of its own, made locally within seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True)
class TinyLlama:
    """Shape of the model. hidden must be a multiple of heads, heads one of key_value_heads."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    key_value_heads: int = 4
    vocabulary: int = 1024
    max_positions: int = 16384
    seed: int = 20


def _words(count: int, seed: int) -> list[str]:
    """count distinct pronounceable words: the vocabulary of the tokenizer."""
    source = random.Random(seed)
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = source.randint(1, 3)
        word = "".join(
            source.choice("bdfghklmnprstvz") + source.choice("aeiou") for _ in range(syllables)
        )
        words[word] = None
    return list(words)


def prompts(count: int, words: int = 12, shape: TinyLlama | None = None) -> list[str]:
    """count different prompts in the vocabulary of the model."""
    shape = shape or TinyLlama()
    vocabulary = _words(shape.vocabulary - len(SPECIAL_TOKENS), shape.seed)
    source = random.Random(shape.seed + 1)
    return [" ".join(source.choices(vocabulary, k=words)) for _ in range(count)]


def make_tiny_llama(directory: Path, shape: TinyLlama | None = None) -> Path:
    """Writes configuration, weights and tokenizer to directory (created) and returns it.

    The weights are wide enough that greedy text depends on what came before it, and the type is
    float32: with random weights the best two tokens are often close, and half precision would let
    the number of requests in a batch decide between them.
    """
    # Both imports take seconds; only the process that makes the model needs them.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape or TinyLlama()
    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 2,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.max_positions,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=SPECIAL_TOKENS.index("<s>"),
        eos_token_id=SPECIAL_TOKENS.index("</s>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    _save_tokenizer(directory, shape)
    return directory


def _save_tokenizer(directory: Path, shape: TinyLlama) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL_TOKENS, *_words(shape.vocabulary - len(SPECIAL_TOKENS), shape.seed)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
