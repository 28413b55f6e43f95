"""Operations of torch as a simulated device needs them: what they return, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

COPY = torch.ops.aten.copy_.default
TO_HOST = torch.ops.aten._local_scalar_dense.default  # the name of `item`
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # its name

_INDEX = torch.ops.aten.index.Tensor
_MASKS = (torch.bool, torch.uint8)

_PIECES = 4
"""Maximum number of steps of a copy."""


@cache
def is_view(function: Any) -> bool:
    """Return whether an operation returns another view of an argument's memory."""
    if function is _UNSAFE_VIEW:
        return True
    aliases = [returned.alias_info for returned in function._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@cache
def _changed_name(function: Any) -> tuple[int, str] | None:
    """Return position and name of the argument that an operation changes and returns."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return index, argument.name
    return None


def changed_argument(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> torch.Tensor | None:
    """Return the argument that an operation changes and returns, if any."""
    found = _changed_name(function)
    if found is None:
        return None
    index, name = found
    changed: torch.Tensor = kwargs[name] if name in kwargs else args[index]
    return changed


def shapes_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation returns, for arguments of zeros: values need not be there yet.

    Tensors without memory would do, but for many operations on them torch imports its compiler.

    Raises:
        NotImplementedError: The shapes depend on values.
    """
    given = tree_flatten((tuple(args), dict(kwargs)))[0]
    has_masks = any(isinstance(each, torch.Tensor) and each.dtype in _MASKS for each in given[1:])
    if torch.Tag.dynamic_output_shape in function.tags and (function is not _INDEX or has_masks):
        raise NotImplementedError(f"{function}: the shape of its result depends on values")
    return function(*_zeros_of(args), **_zeros_of(kwargs))


def _zeros_of(arguments: Any) -> Any:
    return tree_map_only(torch.Tensor, _zeros_like, arguments)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()


def is_non_blocking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return the argument of a copy."""
    position = 2
    return bool(args[position] if len(args) > position else kwargs.get("non_blocking", False))


def steps_of(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[torch.Tensor],
) -> list[Callable[[], object]]:
    """Return the steps of an operation: several for a copy, so that it can be seen half done."""
    if function is COPY:
        return _copy_steps(*args[:2])
    return [partial(_run, function, args, kwargs, outputs)]


def tensor_over(
    content: npt.NDArray[np.uint8], offset_bytes: int, like: torch.Tensor
) -> torch.Tensor:
    """Return a tensor like another one over bytes from an offset."""
    span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    covered = content[offset_bytes : offset_bytes + span * like.element_size()]
    flat = torch.from_numpy(covered).view(like.dtype)
    return flat.as_strided(like.shape, like.stride())


def _copy_steps(target: torch.Tensor, source: torch.Tensor) -> list[Callable[[], object]]:
    if not target.dim() or target.numel() == 1:
        return [partial(target.copy_, source)]
    dim = next(at for at, size in enumerate(target.shape) if size > 1)
    targets = target.tensor_split(min(_PIECES, target.shape[dim]), dim)
    sources = source.expand_as(target).tensor_split(len(targets), dim)
    return [partial(one.copy_, other) for one, other in zip(targets, sources, strict=True)]


def _run(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[torch.Tensor],
) -> None:
    result = function(*args, **kwargs)
    if outputs:
        for output, value in zip(outputs, tree_flatten(result)[0], strict=True):
            output.copy_(value)
