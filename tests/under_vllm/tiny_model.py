"""A Llama of a few hundred thousand weights whose tokens depend on its KV cache.

The weights are drawn from a seed, and large: attention is sharp, and its output outweighs what
comes past it, so that a lost block changes the greedy tokens, and by a wide margin.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 512
HIDDEN = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INNER = 128
MAX_TOKENS = 2048

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": MAX_TOKENS,
    "mlp_bias": False,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}


def save_tiny_model(folder: Path, seed: int = 0, layers: int = LAYERS) -> Path:
    """Write config and weights, and return the folder; equal seeds give equal weights."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)

    weights = {
        "model.embed_tokens.weight": drawn(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": drawn(VOCABULARY, HIDDEN, 4.0),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": drawn(HEADS * HEAD_DIM, HIDDEN, 2.5),
            f"{name}.self_attn.k_proj.weight": drawn(KV_HEADS * HEAD_DIM, HIDDEN, 2.5),
            f"{name}.self_attn.v_proj.weight": drawn(KV_HEADS * HEAD_DIM, HIDDEN, 8.0),
            f"{name}.self_attn.o_proj.weight": drawn(HIDDEN, HEADS * HEAD_DIM, 8.0),
            f"{name}.mlp.gate_proj.weight": drawn(INNER, HIDDEN, 1.0),
            f"{name}.mlp.up_proj.weight": drawn(INNER, HIDDEN, 1.0),
            f"{name}.mlp.down_proj.weight": drawn(HIDDEN, INNER, 1.0),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder
