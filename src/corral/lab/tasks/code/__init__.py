"""Tasks whose completions are programs, which hidden tests check in a sandbox."""

from corral.lab.tasks.code.task import APPS, MBPP, Code, CodeTask, HumanEval

__all__ = ["APPS", "MBPP", "Code", "CodeTask", "HumanEval"]
