"""Computes what a fleet needs of a shared store: requests, bytes, money, servers, the first wall.

Run `python docs/_tools/fleet_cost.py --help` for the options; without options it computes the
fleet of docs/howto/choosing.md, and with `--write` it also writes its table into that page.

The CPU seconds are those that docs/remote-tiers.md reports; the prices and request rates are
assumptions, listed there and below, which options replace.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAGE = Path(__file__).parents[1] / "howto/choosing.md"
BEGIN, END = "<!-- fleet -->\n", "<!-- /fleet -->"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOURS = 730
"""Hours in a month."""
CONNECTIONS = {"valkey": 32, "object": 256}
PORTION_BYTES = 4 * MIB
"""Payload of a call of `valkey`, unless one block is larger."""
CPU = {
    "valkey": {
        "load": {64: 0.60, 256: 0.38, 1024: 0.33, 4096: 0.35},
        "store": {64: 0.53, 256: 0.45, 1024: 0.48, 4096: 0.39},
    },
    "object": {
        "load": {64: 8.3, 1024: 1.5, 4096: 0.95},
        "store": {64: 12.0, 1024: 3.0, 4096: 1.35},
    },
}
"""CPU seconds per GiB on a host, by the block's KiB."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The hosts, their load, and the limits of the resources.

    Attributes:
        hosts: Number of hosts.
        block_bytes: Bytes of a block, which is one object or value.
        prompt_blocks: Blocks for which one lookup asks.
        loads: Blocks that a host loads per second.
        stores: Blocks that a host stores per second.
        latency_s: Seconds that a call takes alone.
        nic_gbit: Gbit/s of a host, in each direction.
        cores: Cores that a host gives to the tier.
        window_bytes: Bytes in flight in each direction: an eighth of the primary.
        kept_bytes: Bytes that the store keeps.
        server_gbit: Gbit/s of a Valkey node, in each direction.
        server_bytes: Bytes that a Valkey node keeps.
        gets, puts: Requests per second that a part of a bucket answers.
        usd_get, usd_put: Price of 1,000 requests.
        usd_gib: Price of a GiB and month in a bucket.
        usd_server: Price of a Valkey node and hour; None: unknown.
    """

    hosts: int = 100
    block_bytes: int = 5 * MIB
    prompt_blocks: int = 312
    loads: float = 312.0
    stores: float = 31.0
    latency_s: float = 0.005
    nic_gbit: float = 100.0
    cores: float = 2.0
    window_bytes: int = 8 * GIB
    kept_bytes: int = 4096 * GIB
    server_gbit: float = 100.0
    server_bytes: int = 512 * GIB
    gets: float = 5500.0
    puts: float = 3500.0
    usd_get: float = 0.0004
    usd_put: float = 0.005
    usd_gib: float = 0.023
    usd_server: float | None = None


class Cost(NamedTuple):
    """What the store has to do for a fleet.

    Attributes:
        requests: Requests per second of all hosts, by kind.
        read_bytes: Bytes per second that all hosts load.
        written_bytes: Bytes per second that all hosts store.
        servers: Valkey nodes, or parts of a bucket.
        usd: Dollars a month; None: unknown.
        walls: Blocks per second that a host could load if only this resource were bounded.
    """

    requests: Mapping[str, float]
    read_bytes: float
    written_bytes: float
    servers: int
    usd: float | None
    walls: Mapping[str, float]

    @property
    def first_wall(self) -> str:
        """The resource that ends first as the load grows."""
        return min(self.walls, key=self.walls.__getitem__)


def cost_of(store: str, fleet: Fleet) -> Cost:
    """Return what `valkey` or `object` needs for this fleet."""
    prompts = fleet.loads / fleet.prompt_blocks
    per_call = max(1, PORTION_BYTES // fleet.block_bytes) if store == "valkey" else 1
    by_host = {
        "lookups": prompts * (1 if store == "valkey" else min(2, fleet.prompt_blocks)),
        "gets": fleet.loads / per_call,
        "puts": fleet.stores / per_call,
    }
    requests = {kind: fleet.hosts * rate for kind, rate in by_host.items()}
    read, written = (fleet.hosts * fleet.block_bytes * rate for rate in (fleet.loads, fleet.stores))
    nic, server_nic = (gbit * 1e9 / 8 for gbit in (fleet.nic_gbit, fleet.server_gbit))
    if store == "valkey":
        parts = (max(read, written) / server_nic, fleet.kept_bytes / fleet.server_bytes)
        usd = fleet.usd_server
        usd = None if usd is None else usd * HOURS * math.ceil(max(1, *parts))
    else:
        asked = requests["gets"] + requests["lookups"]
        parts = (asked / fleet.gets, requests["puts"] / fleet.puts)
        per_s = (asked * fleet.usd_get + requests["puts"] * fleet.usd_put) / 1000
        usd = HOURS * 3600 * per_s + fleet.kept_bytes / GIB * fleet.usd_gib
    cores = fleet.cores - _cpu(store, "store", fleet) * fleet.stores
    busy_s = max(fleet.latency_s, 1e-6)
    return Cost(
        requests,
        read,
        written,
        math.ceil(max(1, *parts)),
        usd,
        {
            "a host's network": nic / fleet.block_bytes,
            "a host's CPU": max(0.0, cores) / _cpu(store, "load", fleet),
            "calls in flight": CONNECTIONS[store] * per_call / busy_s,
            "bytes in flight": fleet.window_bytes / busy_s / fleet.block_bytes,
        },
    )


def load_seconds(fleet: Fleet) -> float:
    """Return how long a host loads a prompt, if its network is the bound."""
    bytes_per_s = fleet.nic_gbit * 1e9 / 8
    return fleet.prompt_blocks * fleet.block_bytes / bytes_per_s + fleet.latency_s


def _cpu(store: str, kind: str, fleet: Fleet) -> float:
    """Return CPU seconds per block, interpolated over the logarithm of its size."""
    sizes, costs = zip(*CPU[store][kind].items(), strict=True)
    cost = np.interp(math.log(fleet.block_bytes / KIB), np.log(sizes), costs)
    return float(cost) * fleet.block_bytes / GIB


def table(fleet: Fleet) -> Iterator[str]:
    """Yield the lines of the table of both stores."""
    costs = {store: cost_of(store, fleet) for store in CPU}
    yield "| | " + " | ".join(f"`{store}`" for store in costs) + " |"
    yield "|---" * (len(costs) + 1) + "|"
    rows = {
        "requests per second: lookups, loads, stores": lambda cost: ", ".join(
            f"{rate:,.0f}" for rate in cost.requests.values()
        ),
        "read, written": lambda cost: " and ".join(
            f"{rate / GIB:,.1f} GiB/s" for rate in (cost.read_bytes, cost.written_bytes)
        ),
        "servers, or parts of the bucket": lambda cost: f"{cost.servers:,}",
        "money per month": lambda cost: (
            "by your price of a node" if cost.usd is None else f"${cost.usd:,.0f}"
        ),
        "first wall": lambda cost: (
            f"{cost.first_wall}, at {cost.walls[cost.first_wall]:,.0f} blocks per second"
        ),
    }
    for title, cell in rows.items():
        yield f"| {title} | " + " | ".join(map(cell, costs.values())) + " |"


def page(text: str, fleet: Fleet) -> str:
    """Return the page with the table of a fleet."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, *table(fleet), "", END]) + after


def main(arguments: list[str] | None = None) -> None:
    """Print the table of the fleet that the options describe."""
    parser = argparse.ArgumentParser(description="What a fleet needs of a shared store.")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    for name, default in vars(Fleet()).items():
        kind = int if isinstance(default, int) else float
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=f"default: {default}"
        )
    given = vars(parser.parse_args(arguments))
    write = given.pop("write")
    wrong = [name for name, value in given.items() if value is not None and not value > 0]
    if wrong:
        parser.error(f"--{wrong[0].replace('_', '-')}: give a number above 0")
    fleet = Fleet(**given)
    print("\n".join(table(fleet)))  # noqa: T201 - the table is the output
    if write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), fleet), encoding="utf-8")


if __name__ == "__main__":
    main()
