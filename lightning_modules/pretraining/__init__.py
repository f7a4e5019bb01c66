"""Pretraining: the module, and methods that change how it computes."""

from .module import PretrainingModule

__all__ = ["PretrainingModule"]
