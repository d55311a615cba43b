"""What a test of a library's internals says when a library changed them, so that the reader knows where to look."""

import inspect

import accelerate
import deepspeed
import torch
import transformers

LIBRARIES = (torch, transformers, accelerate, deepspeed)
VERSIONS = ", ".join(f"{library.__name__} {library.__version__}" for library in LIBRARIES)


def changed(ours, theirs, what):
    """ours: our code that relies on it; theirs: the library's name; what it is or does now."""
    return f"{ours} relies on {theirs}, which {what} ({VERSIONS}); read the library's source, then change {ours}"


def parameters(function):
    """Names of what a function or method takes, without `self`."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


def overridden(ours, theirs):
    """Names of the methods of a class that one of its library's has too."""
    return {
        name
        for name, own in vars(ours).items()
        if inspect.isfunction(own) and callable(getattr(theirs, name, None)) and not name.startswith("__")
    }
