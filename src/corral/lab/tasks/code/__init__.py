"""Code tasks: completions are programs, run in a sandbox against hidden tests."""

from corral.lab.tasks.code.task import APPS, MBPP, Code, CodeTask, HumanEval

__all__ = ["APPS", "MBPP", "Code", "CodeTask", "HumanEval"]
