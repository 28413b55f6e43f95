"""The package's commands `bench` and `replay`, with what only this project's measurements need.

    python -m tests.laboratory bench --peer vllm-fs --peer lmcache-fs --plot bench.png
    python -m tests.laboratory replay TRACE --fleet 4 --tier valkey:url=valkey://HOST

`bench` also measures tiers of other engines and plots its figures; `replay` also replays a trace on
a fleet of processes that share a tier.
"""
