"""Stand-ins for packages with accelerator code that SGLang imports, where they are missing."""

import importlib.machinery
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

NAMES = ("flashinfer", "sgl_kernel", "torchvision", "tvm_ffi")


class _AnyClass(type):
    """A class with any attribute, which may be a base class, a decorator or a decorator's maker."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return any_class(name)


def any_class(name):
    def init(self, *_args, **_options):
        pass

    def call(self, decorated=None, *_args, **_options):
        return decorated

    return _AnyClass(name, (), {"__init__": init, "__call__": call})


class _AnyModule(ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return any_class(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _AnyModule(spec.name)

    def exec_module(self, module):
        pass


def install():
    """Make the missing packages importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last, so that installed packages are found first
