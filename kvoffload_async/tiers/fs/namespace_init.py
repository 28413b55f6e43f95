"""Initialisation of a namespace before a tier uses it. Run on I/O threads."""

from __future__ import annotations

import json
import logging
import os

from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.format import require_known_format
from kvoffload_async.tiers.fs.layout import TEMP_SUFFIX, Namespace
from kvoffload_async.tiers.fs.outcome import Verify
from kvoffload_async.tiers.fs.writers import WriterRegistry
from kvoffload_async.tiers.fs.writing import UNVERIFIED_MARKER, BlockWriter

logger = logging.getLogger(__name__)

_CREATE = os.O_WRONLY | os.O_CREAT


def enter_namespace(
    ops: FileOps,
    namespace: Namespace,
    writers: WriterRegistry,
    writer: BlockWriter,
    verify: Verify,
) -> None:
    """Create the folders, and register.

    Raises:
        OSError: The directory cannot be created or written.
        ConfigError: The filesystem lacks a feature that `verify` requires, or a newer release has
            changed the directory's format.
    """
    ops.make_folders(namespace.folder)
    require_known_format(ops, namespace.folder)
    writers.register()  # before any other file: temporary ones name their writer
    _write_config(ops, namespace, writer)
    if verify is Verify.OFF:
        marker = f"{namespace.folder}/{UNVERIFIED_MARKER}"
        ops.close(ops.open_own(marker, os.O_WRONLY))
    if verify is Verify.REQUIRED:
        _require_attributes(ops, namespace, writer)
    writer.sync_root()


def _write_config(ops: FileOps, namespace: Namespace, writer: BlockWriter) -> None:
    """Write the run configuration to a file, for information only; errors are logged."""
    path = namespace.config_path
    temp = f"{namespace.folder}/config.json.{writer.writer_id}.0{TEMP_SUFFIX}"
    text = json.dumps(namespace.fields, indent=2, sort_keys=True)
    try:
        ops.make_folders(path.rpartition("/")[0])
        if ops.exists(path):
            return
        fd = ops.open(temp, _CREATE)
        try:
            written = ops.pwrite(fd, memoryview(text.encode()), 0)
        finally:
            ops.close(fd)
        if written == len(text):
            ops.rename(temp, path)
        else:
            writer.discard(temp)
    except OSError as error:
        logger.warning("%s is not written: %s", path, str(error))
        writer.discard(temp)


def _require_attributes(ops: FileOps, namespace: Namespace, writer: BlockWriter) -> None:
    probe = f"{namespace.folder}/probe.bin.{writer.writer_id}.0{TEMP_SUFFIX}"
    fd = ops.open(probe, _CREATE)
    try:
        ops.set_xattr(fd, "user.kvoffload.probe", b"1")
    except OSError as error:
        raise ConfigError(
            f"verify: 'required' needs extended attributes, which {probe!r} cannot have "
            f"({error}); use 'when_present', or another filesystem"
        ) from error
    finally:
        ops.close(fd)
        writer.discard(probe)
