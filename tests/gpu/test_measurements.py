"""How fast the transport is on a CUDA device: figures are printed, nothing is asserted about them.

pytest tests/gpu -s
"""

import pytest
import torch
from gpu.measurements import Load, report

from kvoffload_async.transport.streams import DeviceRuntime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("block_bytes", [64 * KIB, 256 * KIB, MIB, 2 * MIB])
def test_figures_by_size_of_a_block(block_bytes, capsys):
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")  # noqa: T201
        report(DeviceRuntime(), [Load(block_bytes)], print)
