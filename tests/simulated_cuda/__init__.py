"""A simulated CUDA device, for tests of the transport, the worker and the replay without a GPU.

`device` is the runtime that `CudaTransport` takes, `queues` orders its operations, and `operations`
splits those of torch into steps.
"""
